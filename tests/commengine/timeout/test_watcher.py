"""A collective that does not end in time: real jobs under mpiexec, in which a rank stops or is elsewhere."""

import re

import pytest

from commengine.timeout.watcher import EXIT_CODE
from tests.support.lab.hosts import is_open_mpi

pytestmark = pytest.mark.slow

#: what the ranks of a job run on, besides the world that launch gives them
WATCHED = "timed = Communicator(world.mpi, timeout=2)\n"


def reports(stderr):
    """By rank: the report it printed."""
    parts = re.split(r"^\[rank (\d+)\] (?=.*\n(?:missing|last))", stderr, flags=re.M)
    return {int(rank): text for rank, text in zip(parts[1::2], parts[2::2], strict=True)}


def assert_reported(done, ranks, missing):
    """Each of ``ranks`` printed its report, which names ``missing`` and nobody else."""
    assert done.returncode == EXIT_CODE, (done.returncode, done.stdout, done.stderr)
    found = reports(done.stderr)
    assert set(found) >= set(ranks), done.stderr
    found = {rank: found[rank] for rank in ranks}  # Open MPI wakes a stopped rank before it ends it
    for text in found.values():
        named = [line for line in text.splitlines() if line.startswith("missing: ")]
        assert [re.sub(r" \(.*", "", line) for line in named] == [f"missing: {who}" for who in missing], text
    assert "Traceback" not in done.stderr
    return found


@pytest.mark.parametrize("where", ["", pytest.param(", stream=lane", marks=pytest.mark.long)], ids=["direct", "stream"])
def test_a_stopped_rank_is_named(job, where):
    done, seconds = job(
        WATCHED
        + f"""
lane = timed.new_stream()
for _ in range(6):
    timed.all_reduce(torch.ones(4){where}).wait()
timed.broadcast(torch.ones(3, 5), 1{where}).wait()
if world.rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
timed.all_reduce(torch.ones(8), "max"{where}).wait()
""",
        n=3,
    )
    found = assert_reported(done, {0, 1}, ["rank 2, all_reduce #8"])
    assert seconds < 30
    for text in found.values():
        assert "all_reduce #8 of group 'world' is not done" in text and "(timeout 2 s)" in text
        assert "#7 broadcast(float32 [3, 5], root=1) of group 'world'" in text
        assert re.search(r"#8 all_reduce\(float32 \[8\], op=max\) of group 'world'.*: running for \d", text)


@pytest.mark.long
@pytest.mark.parametrize(
    ("tensor", "where"),
    [("torch.ones(1 << 20)", ", stream=lane"), ("timed.empty((1 << 20,)).fill_(1)", "")],
    ids=["slots-stream", "window-direct"],
)
def test_a_stopped_rank_is_named_where_memory_is_shared(job, tensor, where):
    """The others wait at flags, not in MPI; each collective is still one, and the ranks on their feet end."""
    done, seconds = job(
        WATCHED
        + f"""
lane = timed.new_stream()
tensor = {tensor}
timed.all_reduce(tensor{where}).wait()
timed.all_reduce(tensor{where}).wait()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
timed.all_reduce(tensor{where}).wait()
""",
        n=3,
    )
    found = assert_reported(done, {0, 2}, ["rank 1, all_reduce #3"])
    assert seconds < 15
    assert all(re.search(r"#3 all_reduce\(float32 \[1048576\], op=sum\)", text) for text in found.values())


def test_a_rank_that_stops_while_memory_is_made_is_named(job):
    """The others are in a call of mpi4py, in which Python's lock must not be kept."""
    done, seconds = job(
        WATCHED
        + """
from commengine.shared_memory.segment import NodeMemory
if world.rank == 1:
    NodeMemory._all = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
timed.all_reduce(torch.ones(1 << 20))
""",
    )
    assert_reported(done, {0}, ["rank 1, all_reduce #1"])
    assert seconds < 30


@pytest.mark.long
def test_a_rank_that_computes_is_named_and_says_where_it_is(job):
    done, _ = job(
        WATCHED
        + """
timed.barrier()
if world.rank == 1:
    while True:
        sum(range(1000))
timed.all_reduce(torch.ones(4))
""",
    )
    found = reports(done.stderr)
    assert done.returncode == EXIT_CODE
    assert "missing: rank 1, all_reduce #2 (its last there is barrier #1)" in found[0]
    assert "rank 0 has run out of time" in found[1], "the rank that is missing speaks too"


@pytest.mark.long
def test_a_group_that_was_split_is_watched_and_its_ranks_are_those_of_the_world(job):
    done, _ = job(
        WATCHED
        + """
part = timed.split(world.rank % 2, name="odds and evens")
part.barrier()
if world.rank == 3:
    os.kill(os.getpid(), signal.SIGSTOP)
part.all_reduce(torch.ones(4))
timed.barrier()
""",
        n=4,
    )
    found = reports(done.stderr)
    woken = {3} if is_open_mpi() else set()  # Open MPI wakes a stopped rank before it ends it
    assert done.returncode == EXIT_CODE and {0, 1, 2} <= set(found) <= {0, 1, 2} | woken, done.stderr
    assert "missing: rank 3, all_reduce #2 (it does not answer)" in found[1]


@pytest.mark.parametrize(
    "body, missing",
    [
        ("timed.recv(torch.ones(3), 1) if world.rank == 0 else timed.barrier()", "rank 1, recv #1"),
        pytest.param(
            "if world.rank == 0: timed.split(0)\nelse: time.sleep(60)", "rank 1, split #1", marks=pytest.mark.long
        ),
        pytest.param(
            "if world.rank == 0: timed.new_stream()\nelse: time.sleep(60)",
            "rank 1, new_stream #1",
            marks=pytest.mark.long,
        ),
    ],
    ids=["recv", "split", "new_stream"],
)
@pytest.mark.long
def test_all_that_waits_for_others_is_watched(job, body, missing):
    done, _ = job(WATCHED + body)
    assert done.returncode == EXIT_CODE, (done.stdout, done.stderr)
    assert f"missing: {missing} (" in reports(done.stderr)[0]


@pytest.mark.long
def test_a_rank_that_sleeps_until_all_are_there_is_watched_without_a_thread(job):
    done, _ = job(
        WATCHED + "timed.compare('here') if world.rank == 0 else time.sleep(8)",
        program="import mpi4py\nmpi4py.rc.thread_level = 'funneled'\nfrom mpi4py import MPI\nlaunch.run(main)",
    )
    assert "missing: rank 1, compare #1" in done.stderr, done.stderr


@pytest.mark.long
def test_an_error_that_one_rank_alone_makes_is_found_where_the_others_agree(job):
    done, _ = job(
        """
timed = Communicator(world.mpi, timeout=2, checked=True)
try:
    timed.all_reduce(torch.ones(4, 4).t() if world.rank == 1 else torch.ones(4, 4))
except CollectiveError:
    time.sleep(60)
"""
    )
    assert "missing: rank 1, all_reduce #1 (it has made no call there)" in reports(done.stderr)[0], done.stderr


@pytest.mark.long
def test_a_rank_that_left_is_named(job):
    done, _ = job(
        WATCHED
        + """
if world.rank == 1:
    sys.exit(0)
timed.barrier()
""",
    )
    assert done.returncode != 0
    assert "missing: rank 1, barrier #1" in reports(done.stderr)[0], done.stderr


@pytest.mark.long
def test_ranks_in_different_collectives_are_told_apart(job):
    """Without checked=True MPI may let both hang: both have started number 1, of different kinds."""
    done, _ = job(WATCHED + "timed.barrier() if world.rank == 0 else timed.broadcast(torch.ones(1 << 20), 0)")
    assert done.returncode == EXIT_CODE, (done.stdout, done.stderr)
    assert "missing: rank 1, barrier #1 (it is in broadcast #1 instead)" in done.stderr
    assert "missing: rank 0, broadcast #1 (it is in barrier #1 instead)" in done.stderr


@pytest.mark.long
def test_without_threads_the_call_itself_raises(job):
    done, _ = job(
        """
assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
timed = Communicator(world.mpi, timeout=2)
timed.barrier()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
timed.all_reduce(torch.ones(4))
""",
        program="import mpi4py\nmpi4py.rc.thread_level = 'funneled'\nfrom mpi4py import MPI\nlaunch.run(main)",
    )
    assert done.returncode == 1
    assert "CollectiveTimeout: [rank 0] all_reduce #2 of group 'world' is not done" in done.stderr
    assert "\nmissing: rank 1, all_reduce #2 (it does not answer)\n" in done.stderr


@pytest.mark.long
def test_work_that_ends_in_time_is_left_alone(job):
    """Collectives that take long, but less than the timeout; an idle time that is longer; groups and streams."""
    done, _ = job(
        """
timed = Communicator(world.mpi, timeout=3)
part = timed.split(0, name="part")
lane = part.new_stream()
for wait in (1, 1.5):
    time.sleep(wait if world.rank == 0 else 0)
    timed.barrier()
    work = part.all_reduce(torch.ones(10), stream=lane)
    work.wait()
time.sleep(3.5)
timed.barrier()
part.close()
timed.close()
"""
    )
    assert done.returncode == 0 and done.stderr == "", (done.stdout, done.stderr)


@pytest.mark.parametrize("level", ["multiple", pytest.param("funneled", marks=pytest.mark.long)])
@pytest.mark.long
def test_what_was_split_outlives_the_root_that_was_timed(job, level):
    """It has no timeout any more, and all else works: collectives, streams, splitting, closing."""
    done, _ = job(
        """
timed = Communicator(world.mpi, timeout=0.5)
part = timed.split(0, name="part")
timed.close()
assert (MPI.Query_thread() == MPI.THREAD_MULTIPLE) == (level == "multiple")
again = part.split(world.rank, name="again")
both = part.split(0, key=-world.rank, name="both")
for comm in (part, again, both):
    lane = comm.new_stream()
    tensor = torch.ones(3)
    time.sleep(0.8 * world.rank)
    comm.all_reduce(tensor)
    comm.all_reduce(tensor, stream=lane).wait()
    assert (tensor == comm.size**2).all()
    assert comm is not part or not comm._watched.running
for comm in (both, again, part):
    comm.close()
""",
        program=f"import mpi4py\nmpi4py.rc.thread_level = level = '{level}'\nfrom mpi4py import MPI\nlaunch.run(main)",
    )
    assert done.returncode == 0 and done.stderr == "", (done.stdout, done.stderr)


@pytest.mark.long
def test_a_suspended_job_goes_on(job):
    """The time in which nobody could look does not count; here twice the timeout, in the middle of a collective."""
    done, _ = job(
        """
import subprocess
timed = Communicator(world.mpi, timeout=2)
pids = torch.zeros(world.size, dtype=torch.int64)
pids[world.rank] = os.getpid()
timed.all_reduce(pids)
every = " ".join(map(str, pids.tolist()))
if world.rank == 0:
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -STOP {every}; sleep 4; kill -CONT {every}"])
time.sleep(1.5 * world.rank)
timed.barrier()
time.sleep(1)
timed.barrier()
timed.close()
"""
    )
    assert done.returncode == 0 and done.stderr == "", (done.stdout, done.stderr)


@pytest.mark.long
def test_no_question_is_left_to_the_next_communicator(job):
    """A collective that ends just after its rank asked where the others are; then close, and a new communicator."""
    done, _ = job(
        """
for late in (1.55, 1.6, 1.65):
    timed = Communicator(world.mpi, timeout=2)
    time.sleep(late * world.rank)
    timed.barrier()
    timed.close()
    fresh = world.mpi.Dup()
    assert not fresh.Iprobe(), "a message of the watchers"
    with Communicator(world.mpi) as next_one:
        next_one.all_reduce(torch.ones(3))
    fresh.Free()
"""
    )
    assert done.returncode == 0 and done.stderr == "", (done.stdout, done.stderr)


def test_a_crash_shows_the_call_and_the_line_of_the_program(job):
    """A crash in C code of the main thread, as in a call of MPI."""
    done, _ = job(
        """
import threading
timed = Communicator(world.mpi, timeout=20)
if world.rank == 1:
    threading.Timer(0.5, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGSEGV)).start()
    timed.barrier()
time.sleep(30)
""",
    )
    assert done.returncode not in (0, 1, EXIT_CODE), done
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert re.search(r" in barrier\n  File .*program.py\", line \d+ in main\n", done.stderr), done.stderr


@pytest.mark.long
def test_a_crash_is_written_where_the_program_wants_it(job, tmp_path):
    """Also one that holds Python's lock."""
    done, seconds = job(
        f"""
import ctypes, faulthandler
file = open({str(tmp_path / "stacks")!r}, "w")
faulthandler.enable(file)
timed = Communicator(world.mpi, timeout=20)
getattr(ctypes.PyDLL(None), "raise")(signal.SIGILL)
""",
        n=1,
    )
    assert done.returncode != 0 and seconds < 15 and "Fatal Python error" not in done.stderr, done
    assert "Fatal Python error: Illegal instruction" in (tmp_path / "stacks").read_text()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("timeout", [0, -1, "2", float("nan")])
def test_a_timeout_that_is_no_time_is_refused(mpi_world, timeout):
    from commengine import CollectiveError, Communicator

    with pytest.raises(CollectiveError, match=r"timeout=.* must be a positive number of seconds"):
        Communicator(mpi_world, timeout=timeout)
