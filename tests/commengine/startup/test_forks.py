"""A child that a rank forks is no rank: it may end in any way, and the job goes on."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.support import mpirun

pytestmark = pytest.mark.slow

#: ways to leave a child, and its status
ENDS = {
    "sys.exit(3)": 3,
    "raise ValueError('in a child')": 1,
    "return": 0,
    "abort(5)": 5,
    "say_once_and_abort('stopped', 75)": 75,
}


@pytest.mark.long
def test_children_of_both_ranks_of_a_bridge_end_by_themselves(job):
    """Bridge, its communicators, MPI's own end, `launch.run` and `job_end.abort`: none acts for the rank."""
    body = """
        from commengine import Decomposition
        from commengine.job_end import abort, say_once_and_abort
        from tplayers import Bridge, BridgeField
        part = launch.split_world(world.rank, comm=world.mpi)
        comm = Communicator(part.comm, device="cpu")
        field = BridgeField(Decomposition([(3,)]))
        bridge = Bridge(part.other, comm, field, field)
    """
    ends = "".join(
        f"pid = os.fork()\nif pid == 0: {end}\n"
        f"assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == {code}, {end!r}\n"
        for end, code in ENDS.items()
    )
    after = """
        if world.rank == 0:
            answer = bridge.call(torch.ones(3, dtype=torch.float64))
        else:
            assert bridge.answer(lambda x: 2 * x) == "call" and bridge.answer(None) == "end"
            answer = torch.full((3,), 2.0, dtype=torch.float64)
        bridge.close()
        world.all_reduce(answer)
        assert answer.tolist() == [4.0] * 3
        comm.close()
        part.close()
        print("whole", flush=True)
    """
    done, _ = job(textwrap.dedent(body) + ends + textwrap.dedent(after))
    assert done.returncode == 0 and done.stdout.count("whole") == 2, done
    assert done.stderr.count("ValueError: in a child") == 2 and "ends and has not closed" not in done.stderr, done


#: a command that listens, and a child that gets a signal which its parent handles; the parent says what it saw
SIGNALLED = """
import os, signal, sys, time
{listen}
ready, go = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(go, b"x")
    for _ in range(400):  # Python hears a signal that came just before a sleep when the sleep ends
        time.sleep(0.05)
    os._exit(0)
os.read(ready, 1)
os.kill(pid, signal.SIGTERM)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
time.sleep(0.3)
print(status, heard)
"""


@pytest.mark.parametrize(
    "listen",
    [
        "heard = []\nfrom trainers.run.signals import end_on_signals\nend_on_signals([])",
        "heard = []\nfrom trainers.run.signals import SignalListener\nlistener = SignalListener(heard.append)",
        "heard = []\nfrom commengine.job_end import handle_signal\n"
        "handle_signal(signal.SIGTERM, lambda *_: heard.append(1))\nhandle_signal(signal.SIGTERM, lambda *_: 1)",
    ],
    ids=["before the run", "in the run", "two handlers"],
)
def test_a_signal_to_a_child_is_the_childs(listen):
    """As DataLoader and multiprocessing send SIGTERM to their workers."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED.format(listen=listen)],
        env=mpirun.environment(), cwd=mpirun.ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{-signal.SIGTERM} []\n"), done


def test_a_child_does_not_give_back_its_parents_lock(tmp_path):
    from trainers.checkpoints.folder_lock import FolderLock

    with FolderLock(tmp_path) as lock:
        assert lock.attempt() is None
        pid = os.fork()
        if pid == 0:
            lock.release()
            os._exit(0)
        os.waitpid(pid, 0)
        assert lock.path.exists()
    assert not lock.path.exists()


def test_a_child_does_not_tell_the_roll_call_that_its_parent_ended(tmp_path):
    """The memory that the watcher reads has a byte for the end of the program."""
    program = tmp_path / "program.py"
    program.write_text(
        "import mmap, os, sys\n"
        "pid = os.fork()\n"
        "if pid == 0: sys.exit(4)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4\n"
        "names = os.listdir('/proc/self/fd')\n"
        "files = [name for name in names if os.path.lexists(f'/proc/self/fd/{name}')]\n"
        "links = {os.readlink(f'/proc/self/fd/{name}'): int(name) for name in files}\n"
        "print(mmap.mmap(links['/memfd:moves (deleted)'], 5)[0])\n"
    )
    argv = [mpirun.mpiexec(), "-n", "1", sys.executable, "-m", "commengine.rollcall", str(program)]
    done = mpirun.command(argv, timeout=60, fresh=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done
