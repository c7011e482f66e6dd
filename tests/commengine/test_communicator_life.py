"""One rank's constructor, split, `empty` or `close` differs, or does not come: the ways, listed.

No way leaves a rank waiting: either every rank raises an error that says who asked for what, and the group goes on, or
the job ends with a report that names the rank.
"""

import re

import numpy as np
import pytest
import torch

from commengine import CartesianGrid, CollectiveError, CollectiveMismatch, Communicator, ProcessGrid
from commengine.host.switch_points import Key, Point, SwitchPoints
from commengine.timeout.watcher import EXIT_CODE
from tests.support.exact import ALWAYS

OTHER_POINTS = SwitchPoints({Key("all_reduce", "full", 2): Point(window=1 << 12)})


class Wordless:
    """An argument that cannot be printed."""

    def __repr__(self):
        raise RecursionError("it contains itself")


#: id: what the last rank gives its constructor, what the others give, and what every rank is told
CONSTRUCTORS = {
    "timeout or none": ({"timeout": 30}, {}, "timeout=30.0", "timeout=None"),
    "timeouts": ({"timeout": 30}, {"timeout": 40}, "timeout=30.0", "timeout=40.0"),
    "timeout text": ({"timeout": "30"}, {"timeout": 30}, "timeout='30' must be a positive number of seconds"),
    "timeout negative": ({"timeout": -1}, {"timeout": 30}, "timeout=-1 must be a positive number of seconds"),
    "order or none": ({"order": "rank"}, {}, "order=rank", "order=None"),
    "orders": ({"order": "rank"}, {"order": "tree"}, "order=rank", "order=tree"),
    "no order": ({"order": "ranks"}, {}, "order='ranks' is not one of None, rank, tree"),
    "no device": ({"device": "disk"}, {}, "device='disk' must be"),
    "devices": ({"device": "cuda"}, {}, "device=cuda", "device=cpu"),
    "no transport": ({"transport": "pigeon"}, {}, "transport='pigeon' is not one of nccl, staged"),
    "transports": ({"transport": "staged"}, {}, "transport=staged", "transport=nccl"),
    "tables": ({"switch_points": ALWAYS}, {"switch_points": OTHER_POINTS}, f"switch_points={ALWAYS.digest}",
               f"switch_points={OTHER_POINTS.digest}"),
    "table or none": ({"switch_points": ALWAYS}, {}, f"switch_points={ALWAYS.digest}", "switch_points=None"),
    "no table": ({"switch_points": 5}, {}, "switch_points=5 is not a SwitchPoints"),
    "checked": ({"checked": True}, {}, "checked=True", "checked=False"),
    "names": ({"name": "b"}, {"name": "a"}, "name='b'", "name='a'"),
    # errors that the argument's own class raises
    "an array": ({"order": np.array(["rank", "tree"])}, {}, "order: ValueError: "),
    "a table without rows": ({"switch_points": SwitchPoints(None)}, {}, "switch_points: AttributeError: "),
    "too large for a float": ({"timeout": 10**400}, {}, "timeout: OverflowError: "),
    "no words": ({"checked": Wordless()}, {}, "checked: RecursionError: "),
}  # fmt: skip


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", CONSTRUCTORS)
def test_a_constructor_with_other_arguments_is_an_error_on_every_rank(mpi_world, way):
    last, others, *words = CONSTRUCTORS[way]
    with pytest.raises(CollectiveError) as caught:
        Communicator(mpi_world, **{"device": "cpu", **(last if mpi_world.rank == mpi_world.size - 1 else others)})
    assert_told(str(caught.value), words, mpi_world.size)
    assert isinstance(caught.value, CollectiveMismatch) == (len(words) == 2)


def assert_told(message, words, size):
    """words: what the last rank asked for, and what the others asked for; or only what is wrong on the last rank."""
    if len(words) == 1:
        assert re.search(f"rank {size - 1}: .*{re.escape(words[0])}", message), message
        return
    last, others = (re.escape(one) for one in words)
    who = "rank 0" if size == 2 else f"ranks {', '.join(map(str, range(size - 1)))}"
    assert re.search(rf"{who} asked for .*{others}.*; rank {size - 1} asked for .*{last}", message), message


#: id: what the last rank does, what the others do, and what every rank is told
LIVES = {
    "split or empty": (lambda c: c.split(0), lambda c: c.empty((4,)), "split", "empty(float32 [4])"),
    "split or stream": (lambda c: c.split(0), lambda c: c.new_stream(), "split", "new_stream(number 1"),
    "split or close": (lambda c: c.split(0), lambda c: c.close(), "split", "close"),
    "split or block": (lambda c: c.split(0), lambda c: c.block(1), "split", "block(1)"),
    "color": (lambda c: c.split(-1), lambda c: c.split(0), "split: color=-1 must be None or an integer from 0 to"),
    "color text": (lambda c: c.split("a"), lambda c: c.split(0), "split: color='a' must be"),
    "key": (lambda c: c.split(0, 2**40), lambda c: c.split(0), f"split: key={2**40} must be an integer"),
    "blocks": (lambda c: c.block(1), lambda c: c.block(c.size), "block(1)", "block(SIZE)"),
    "block": (lambda c: c.block(0), lambda c: c.block(1), "block: size=0 must be an integer that divides"),
    "block text": (lambda c: c.block("1"), lambda c: c.block(1), "block: size='1' must be an integer that divides"),
    "shapes": (lambda c: c.empty((2, 3)), lambda c: c.empty((3, 2)), "empty(float32 [2, 3])", "empty(float32 [3, 2])"),
    "dtypes": (lambda c: c.empty((4,), torch.float64), lambda c: c.empty((4,)), "float64 [4]", "float32 [4]"),
    "negative": (lambda c: c.empty((-4,)), lambda c: c.empty((4,)), "empty: RuntimeError"),
    "no shape": (lambda c: c.empty(None), lambda c: c.empty((4,)), "empty: TypeError"),
    "stream device": (lambda c: c.new_stream(device="disk"), lambda c: c.new_stream(), "device='disk' is not 'cpu'"),
    "priorities": (lambda c: c.new_stream(priority=0), lambda c: c.new_stream(), "priority=0", "priority=-1"),
    "close or empty": (lambda c: c.close(), lambda c: c.empty((4,)), "close", "empty(float32 [4])"),
    "close or compare": (lambda c: c.close(), lambda c: c.compare("here"), "close", "here"),
    "node or split": (lambda c: c.node_size, lambda c: c.split(0), "node_size", "split"),
    "tensor sizes": (lambda c: ProcessGrid(c, 1), lambda c: ProcessGrid(c, c.size), "(tensor=1)", "(tensor=SIZE)"),
    "tensor size": (lambda c: ProcessGrid(c, c.size + 1), lambda c: ProcessGrid(c, 1), "does not divide the SIZE"),
    "grids": (lambda c: CartesianGrid(c, (c.size,)), lambda c: CartesianGrid(c, (1, c.size)), "[SIZE]", "[1, SIZE]"),
}  # fmt: skip


@pytest.fixture
def comm(mpi_world):
    with Communicator(mpi_world, timeout=30, switch_points=ALWAYS) as comm:
        yield comm
        comm.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", LIVES)
def test_what_the_ranks_make_together_is_compared_and_the_group_goes_on(comm, way):
    last, others, *words = LIVES[way]
    with pytest.raises(CollectiveError) as caught:
        (last if comm.rank == comm.size - 1 else others)(comm)
    assert_told(str(caught.value), [one.replace("SIZE", str(comm.size)) for one in words], comm.size)
    tensor = torch.ones(3)
    comm.all_reduce(tensor)
    assert tensor.eq(comm.size).all()
    part = comm.split(0)
    part.all_reduce(tensor)
    part.close()


@pytest.mark.mpi(min_size=2)
def test_a_checked_collective_is_compared_with_close(mpi_world):
    comm = Communicator(mpi_world, checked=True, timeout=30)
    with pytest.raises(CollectiveMismatch, match=r"asked for all_reduce\(float32 \[3\], op=sum\)"):
        comm.close() if comm.rank == 0 else comm.all_reduce(torch.ones(3))
    comm.close()


@pytest.mark.mpi(min_size=2)
def test_a_failure_on_a_blocks_stream_is_told_after_everything_is_freed(mpi_world):
    comm = Communicator(mpi_world, timeout=30)
    block = comm.block(comm.size)
    if comm.rank == 0:

        def fail():
            raise ValueError("it failed")

        block.new_stream().enqueue(fail)
        with pytest.raises(CollectiveError, match=r"close: a collective failed on a stream.*it failed"):
            comm.close()
    else:
        block.new_stream()
        comm.close()
    comm.close()  # nothing is left
    from mpi4py import MPI

    assert comm.mpi == MPI.COMM_NULL and block.mpi == MPI.COMM_NULL


# The job ends -----------------------------------------------------------------------------------------------------

MULTIPLE, FUNNELED = "multiple", "funneled"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
TIMED = "timed = Communicator(world.mpi, timeout=1.5)\n"


def absent(call, before=TIMED):
    """The last rank does not come to ``call``."""
    return f"{before}if world.rank == world.size - 1:\n    time.sleep(30)\n{call}"


#: id: ranks, the level of threads, what they do, who is named by the others, and whether it is in the usual run. In a
#: constructor nobody can be asked: there, the ranks that report that they have come
ENDS = {
    "constructor absent": (2, MULTIPLE, absent(TIMED, ""), {0}, False),
    "constructor absent, receives from anybody": (
        3, MULTIPLE,
        "if world.rank < 2:\n    held = [world.mpi.Irecv(bytearray(9)) for _ in range(2)]\n" + absent(TIMED, ""),
        {0, 1}, True,
    ),
    "constructor absent, one rank without a timeout": (
        3, MULTIPLE, absent("Communicator(world.mpi, timeout=None if world.rank else 1.5)", ""),
        {0}, False,
    ),
    "constructor late": (
        2, MULTIPLE, f"time.sleep(2.3 * world.rank)\n{TIMED}time.sleep(30)", {0}, False,
    ),
    "constructor stopped while the group is duplicated": (
        2, MULTIPLE,
        f"from commengine.calls import opening\nif world.rank:\n    opening._duplicate = lambda *_: {STOP}\n{TIMED}",
        {0}, False,
    ),
    "constructor of another communicator": (
        2, MULTIPLE, "other = world.mpi.Dup()\nCommunicator(other if world.rank else world.mpi, timeout=1.5)",
        {0, 1}, False,
    ),
    "constructor absent, and a wrong argument": (
        2, MULTIPLE, absent("Communicator(world.mpi, timeout=1.5, order='bad')", ""), {0}, False,
    ),
    "barrier instead of the constructor": (
        2, MULTIPLE, f"if world.rank:\n    world.mpi.Barrier()\n{TIMED}", {0}, False,
    ),
    "constructor absent, no threads": (2, FUNNELED, absent(TIMED, ""), {0}, False),
    "split": (2, MULTIPLE, absent("timed.split(0)"), "rank 1, split #1", False),
    "split, no threads": (2, FUNNELED, absent("timed.split(0)"), "rank 1, split #1", False),
    "all_reduce instead of split": (
        2, MULTIPLE, f"{TIMED}timed.all_reduce(torch.ones(1)) if world.rank else timed.split(0)", "rank 1, split #1",
        False,
    ),
    "empty": (2, MULTIPLE, absent("timed.empty((4,))"), "rank 1, empty #1", False),
    "block": (2, MULTIPLE, absent("timed.block(1)"), "rank 1, block #1", False),
    "node_size": (2, MULTIPLE, absent("timed.node_size"), "rank 1, node_size #1", False),
    "close": (2, MULTIPLE, absent("timed.close()"), "rank 1, close #1", False),
    "close, no threads": (2, FUNNELED, absent("timed.close()"), "rank 1, close #1", False),
    "close of a part": (
        3, MULTIPLE, absent("part.close()", f"{TIMED}part = timed.split(0)\n"), "rank 2, close #1", False,
    ),
    "close stopped at the very last wait": (
        3, MULTIPLE,
        "from commengine.timeout.watcher import Watch\n"
        # Another rank has a second to answer, and not a quarter of 1.5 s, which three ranks on two cores may need.
        f"if world.rank == 2:\n    Watch._leave = lambda _: {STOP}\n{TIMED.replace('1.5', '4')}timed.close()",
        "rank 2, close #1", False,
    ),
    "close after an error": (
        2, MULTIPLE,
        f"{TIMED}lane = timed.new_stream()\nif world.rank:\n    time.sleep(30)\n"
        "lane.enqueue(lambda: 1 / 0)\ntimed.close()",
        "rank 1, close #2", False,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param(way, marks=() if ENDS[way][-1] else pytest.mark.long) for way in ENDS])
def test_a_rank_that_does_not_come_is_named(job, way):
    ranks, level, body, missing, _ = ENDS[way]
    program = f"import mpi4py\nmpi4py.rc.thread_level = {level!r}\nfrom mpi4py import MPI\nlaunch.run(main)"
    done, seconds = job(body, n=ranks, program=program)
    assert done.returncode in (EXIT_CODE, 1) and seconds < 1.5 + 10 + 15, (done.stdout, done.stderr)  # 15: it starts
    if isinstance(missing, set):
        words = r"is not done after \S+ s \(timeout 1.5 s\)\nmissing: the ranks that do not report this\n"
        came = re.findall(rf"^\[rank (\d)\] Communicator #1 of group 'world' {words}", done.stderr, re.M)
        assert sorted(came) == [str(rank) for rank in sorted(missing)], done.stderr
        return
    report = re.search(
        r"^(?:.*CollectiveTimeout: )?\[rank 0\] \S+ #\d .* is not done.*\n(?:missing: .*\n)+", done.stderr, re.M
    )
    assert report, done.stderr
    named = re.findall(r"missing: (rank \d+, \S+ #\d+)", report[0])
    assert named == [missing], done.stderr
