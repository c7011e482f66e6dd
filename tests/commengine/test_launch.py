"""Starting and ending: real jobs under mpiexec, in which one rank fails."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import mpirun

pytestmark = pytest.mark.slow

GONE_S = 30.0  # how long a job may live after one rank failed, its start included


def assert_ended(done, seconds, code):
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert seconds < GONE_S


# A rank that fails


def test_uncaught_exception_ends_every_rank(job):
    done, seconds = job(
        """
        if world.rank == 1:
            raise ValueError("rank one gives up")
        world.barrier()
        """
    )
    assert_ended(done, seconds, 1)
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert "[rank 1] Traceback" in done.stderr
    assert done.stderr.count("ValueError: rank one gives up") == 1
    assert 'raise ValueError("rank one gives up")' in done.stderr


@pytest.mark.long
def test_an_abort_does_not_wait_for_a_pipe_that_nobody_reads():
    program = """
import os, sys
from commengine import job_end
job_end.ABORT_SECONDS = 1
os.set_blocking(1, False)
try:
    while True:
        os.write(1, bytes(1024))
except BlockingIOError:
    os.set_blocking(1, True)
sys.stdout = open(1, "w")  # with a buffer, whatever PYTHONUNBUFFERED says
sys.stdout.write("last words")
job_end.abort(3)
"""
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=mpirun.ROOT) as process:
        try:
            assert process.wait(GONE_S) == -signal.SIGALRM
        finally:
            process.kill()


@pytest.mark.long
def test_uncaught_exception_ends_ranks_that_wait_on_a_stream(job):
    done, seconds = job(
        """
        stream = world.new_stream()
        if world.rank == 0:
            raise ValueError("rank zero gives up")
        world.all_reduce(torch.ones(3), stream=stream).wait()
        """
    )
    assert_ended(done, seconds, 1)
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert "[rank 0] Traceback" in done.stderr


@pytest.mark.long
def test_chained_exceptions_are_shown_whole(job):
    done, seconds = job(
        """
        if world.rank == 0:
            try:
                1 / 0
            except ZeroDivisionError as error:
                raise ValueError("worse") from error
        world.barrier()
        """
    )
    assert_ended(done, seconds, 1)
    assert "ZeroDivisionError" in done.stderr and "ValueError: worse" in done.stderr


@pytest.mark.long
def test_sys_exit_with_a_number(job):
    done, seconds = job("if world.rank == 1: sys.exit(7)\nworld.barrier()")
    assert_ended(done, seconds, 7)
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_sys_exit_with_text(job):
    done, seconds = job("if world.rank == 1: sys.exit('no such file')\nworld.barrier()")
    assert_ended(done, seconds, 1)
    assert "[rank 1] no such file" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "how", ["return 0", *(pytest.param(how, marks=pytest.mark.long) for how in ("sys.exit()", "sys.exit(0)"))]
)
def test_good_ends(job, how):
    done, _ = job(f"world.barrier()\n{how}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("code", [256, pytest.param(2**31, marks=pytest.mark.long)])
@pytest.mark.long
def test_a_code_that_a_process_cannot_end_with_is_still_an_error(job, code):
    done, seconds = job(f"if world.rank == 1:\n    sys.exit({code})\nworld.barrier()")
    assert_ended(done, seconds, 1)


@pytest.mark.long
def test_standard_error_that_is_closed_does_not_keep_the_others_waiting(job):
    done, seconds = job("if world.rank == 1:\n    os.close(2)\n    raise ValueError\nworld.barrier()")
    assert_ended(done, seconds, 1)


@pytest.mark.long
def test_main_may_close_the_world_itself(job):
    assert_ended(*job("with world:\n    world.barrier()"), 0)


@pytest.mark.long
def test_returned_code_of_all_ranks(job):
    done, seconds = job("return 5")
    assert_ended(done, seconds, 5)
    assert done.stderr == ""


@pytest.mark.long
def test_returned_code_of_one_rank_that_the_others_wait_for(job):
    done, seconds = job("if world.rank == 1: return 5\nworld.barrier()")
    assert_ended(done, seconds, 5)
    assert "[rank 1] ended with exit code 5, but not every rank did" in done.stderr


@pytest.mark.long
def test_ctrl_c_on_one_rank(job):
    done, seconds = job(
        """
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        world.barrier()
        """
    )
    assert_ended(done, seconds, 130)
    assert done.stderr.count("[rank 0] interrupted (SIGINT)\n") == 1 and "Traceback" not in done.stderr


def test_killed_rank(job):
    done, seconds = job("if world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nworld.barrier()")
    assert done.returncode != 0 and seconds < GONE_S


@pytest.mark.long
def test_mismatch_that_nobody_catches(job):
    done, seconds = job(
        """
        comm = Communicator(world.mpi, checked=True)
        comm.all_reduce(torch.ones(world.rank + 1))
        """
    )
    assert_ended(done, seconds, 1)
    assert "the ranks disagree: rank 0 asked for all_reduce(float32 [1], op=sum); rank 1" in done.stderr


def test_failure_on_a_stream_ends_the_job(job):
    done, seconds = job(
        """
        stream = world.new_stream()
        if world.rank == 0:
            world.recv(torch.ones(2), 1, stream=stream).wait()
        else:
            world.send(torch.ones(4), 0, stream=stream).wait()
        world.barrier()
        """
    )
    assert_ended(done, seconds, 1)
    assert "[rank 0] Traceback" in done.stderr and "rank 0 of group 'world' (size 2): recv" in done.stderr


@pytest.mark.long
def test_standard_output_that_is_closed_does_not_keep_the_others_waiting(job):
    done, seconds = job(
        """
        if world.rank == 1:
            sys.stdout.close()
            raise ValueError("rank one gives up")
        world.barrier()
        """
    )
    assert_ended(done, seconds, 1)


@pytest.mark.long
def test_abort_on_error_in_a_program_that_is_not_ours(job):
    done, seconds = job(
        "if world.rank == 1: raise ValueError('mine')\nworld.barrier()",
        program="from mpi4py import MPI\nwith launch.abort_on_error():\n    main(Communicator(MPI.COMM_WORLD))",
    )
    assert_ended(done, seconds, 1)
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr


@pytest.mark.long
def test_abort_on_error_ends_the_job_from_a_callback_of_ctypes(job):
    """An exception of a callback goes no further than ctypes, which prints it and returns to the C function."""
    done, seconds = job(
        """import ctypes
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
@launch.abort_on_error()
def compare(one, other):
    if world.rank == 1: raise ValueError('in the callback')
    world.barrier()
    return 0
ctypes.CDLL(None).qsort((ctypes.c_int * 2)(2, 1), 2, 4, compare)
world.barrier()""",
        program="from mpi4py import MPI\nwith launch.abort_on_error():\n    main(Communicator(MPI.COMM_WORLD))",
    )
    assert_ended(done, seconds, 1)
    assert done.stderr.count("ValueError: in the callback") == 1, done.stderr
    assert "[rank 1]" in done.stderr


# Wrong use, which every rank sees


def test_usage_error_is_said_once(job):
    done, seconds = job("raise UsageError('--tensor-model-parallel-size 3 does not divide 2')", n=2)
    assert_ended(done, seconds, 2)
    assert done.stderr == "error: --tensor-model-parallel-size 3 does not divide 2\n"


@pytest.mark.long
def test_usage_error_of_one_rank_alone_is_said_and_ends_the_job(job):
    done, seconds = job("if world.rank == 1: raise UsageError('only here')\nworld.barrier()")
    assert_ended(done, seconds, 2)
    assert "[rank 1] error: only here" in done.stderr


# Programs that are not ours


IMPORT = """
import sys, os, signal, threading
import mpi4py
before = {name: getattr(mpi4py.rc, name) for name in dir(mpi4py.rc)}
hook, environ, threads = sys.excepthook, dict(os.environ), threading.active_count()
import torch
signals = [signal.getsignal(number) for number in range(1, 32)]
grad, dtype, n = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
import commengine, tplayers
assert 'mpi4py.MPI' not in sys.modules, 'MPI was imported'
after = {name: getattr(mpi4py.rc, name) for name in dir(mpi4py.rc)}
assert {k: v for k, v in after.items() if not callable(v)} == {k: v for k, v in before.items() if not callable(v)}
assert before.keys() == after.keys()
assert sys.excepthook is hook and threading.excepthook is threading.__excepthook__
assert dict(os.environ) == environ and threading.active_count() == threads
assert [signal.getsignal(number) for number in range(1, 32)] == signals
assert (grad, dtype, n) == (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads())
assert 'cupy' not in sys.modules
"""


@pytest.mark.long
def test_import_changes_nothing_and_says_nothing():
    done = mpirun.command([sys.executable, "-W", "error", "-c", IMPORT], timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.long
def test_program_that_turned_off_mpi4pys_start(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        "import mpi4py\nmpi4py.rc.initialize = False\n"
        "import torch\nfrom commengine import CollectiveError, launch\n"
        "def main(world):\n"
        "    tensor = torch.ones(2)\n"
        "    world.all_reduce(tensor, stream=world.new_stream()).wait()\n"
        "    assert tensor.tolist() == [world.size] * 2\n"
        "    try:\n"
        "        world.sendrecv(torch.ones(4), 1 - world.rank, torch.ones(2), 1 - world.rank)\n"
        "    except CollectiveError:\n"
        "        print('told\\n', end='', flush=True)\n"
        "launch.run(main)\n"
    )
    done = mpirun.run(2, str(path), fresh=True)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.split() == ["told", "told"]


def test_communicator_before_mpi_is_started_is_refused():
    program = (
        "import mpi4py\nmpi4py.rc.initialize = False\nfrom mpi4py import MPI\nfrom commengine import Communicator\n"
        "try:\n    Communicator(MPI.COMM_WORLD)\nexcept RuntimeError as error:\n    print(error)\n"
    )
    done = mpirun.command([sys.executable, "-c", program], timeout=40, fresh=False)
    assert done.stdout.startswith("MPI is not running"), done


SOLVER = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
import torch
from commengine import Communicator, ProcessGrid

MPI.Init_thread(MPI.THREAD_MULTIPLE)
world = MPI.COMM_WORLD
theirs = world.Split(world.rank % 2, world.rank)
handlers = world.Get_errhandler(), theirs.Get_errhandler()
for mpi_comm in (world, theirs):
    for ending in range(2):
        with Communicator(mpi_comm) as comm, ProcessGrid(comm, tensor=comm.size) as grid:
            tensor = torch.ones(3)
            grid.tensor.all_reduce(tensor, stream=grid.tensor.new_stream()).wait()
            assert tensor.tolist() == [mpi_comm.size] * 3
            comm.close()
        assert MPI.Is_initialized() and not MPI.Is_finalized()
        assert mpi_comm.allreduce(1) == mpi_comm.size and world.allreduce(1) == world.size
assert (world.Get_errhandler(), theirs.Get_errhandler()) == handlers
late = Communicator(theirs)
stream = late.new_stream()
theirs.Free()
tensor = torch.ones(1)
late.all_reduce(tensor, stream=stream).wait()  # it has a duplicate
MPI.Finalize()
late.close()  # too late to free anything, and no harm done
assert MPI.Is_finalized()
try:
    Communicator(MPI.COMM_WORLD)
except RuntimeError as error:
    print(f"{error}\\n", end="", flush=True)
"""


def test_program_that_owns_mpi_and_lends_a_communicator(tmp_path):
    (tmp_path / "solver.py").write_text(SOLVER)
    done = mpirun.run(2, str(tmp_path / "solver.py"))
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.count("MPI is not running") == 2


@pytest.mark.long
@pytest.mark.parametrize("busy", [False, True], ids=["idle stream", "busy stream"])
def test_program_that_ends_without_close(tmp_path, busy):
    """No hang and no crash, although a worker is waiting or in the middle of something."""
    (tmp_path / "careless.py").write_text(
        "from mpi4py import MPI\nimport torch\nfrom commengine import Communicator\n"
        "comm = Communicator(MPI.COMM_WORLD)\nstream = comm.new_stream()\n"
        f"for _ in range({20 * busy}):\n    comm.all_reduce(torch.ones(100_000), stream=stream)\n"
    )
    began = time.monotonic()
    done = mpirun.run(2, str(tmp_path / "careless.py"), timeout=40, fresh=True)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert time.monotonic() - began < GONE_S


@pytest.mark.long
def test_program_that_ends_while_pytorch_works_in_a_stream(tmp_path):
    """Python ends threads that come back from PyTorch then, which aborted the process."""
    (tmp_path / "careless.py").write_text(
        "from mpi4py import MPI\nimport torch\nfrom commengine import Communicator\n"
        "comm = Communicator(MPI.COMM_WORLD)\nstream = comm.new_stream()\ntensor = torch.ones(3_000_000)\n"
        "for _ in range(100):\n    stream.enqueue(lambda: tensor.mul_(1.0))\n"
    )
    done = mpirun.run(1, str(tmp_path / "careless.py"), timeout=40, fresh=True)
    assert (done.returncode, done.stderr) == (0, ""), done


def test_ctrl_c_at_the_terminal_ends_the_job(tmp_path):
    """The launcher gets the signal, as it does from a terminal, and passes it on."""
    (tmp_path / "program.py").write_text(
        "import time\nfrom commengine import launch\n"
        "def main(world):\n    print('here', flush=True)\n    time.sleep(60)\n"
        "launch.run(main)\n"
    )
    argv = [mpirun.mpiexec(), "-n", "2", sys.executable, str(tmp_path / "program.py")]
    process = mpirun.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.readline().startswith("here")
        began = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=GONE_S)
        assert process.returncode != 0 and time.monotonic() - began < GONE_S
    finally:
        mpirun.stop(process)
