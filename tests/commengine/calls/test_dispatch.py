"""What a call leaves behind that an exception ends in the middle; forked children; blocks of other threads."""

import os
import re
import signal
import sys
import threading
import time

import pytest
import torch

from commengine import CollectiveError, CollectiveMismatch, Communicator
from commengine.operations import all_reduce
from tests.commengine.calls import drawn
from tests.support import mpirun
from tests.support.exact import ALWAYS, NEVER

pair = pytest.mark.mpi(min_size=2)

#: id: what makes the tensor of a call, from a communicator
TENSORS = {"private": lambda comm: torch.empty(5000), "window": lambda comm: comm.empty((5000,))}


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.fixture
def comm(mpi_world):
    with Communicator(mpi_world, device="cpu", switch_points=ALWAYS) as comm:
        yield comm


def refused(comm, call, words):
    """Whether a call raises at once, and says since when and why."""
    begun = time.monotonic()
    with pytest.raises(CollectiveError, match=words):
        call()
    assert time.monotonic() - begun < 5


@pair
@pytest.mark.parametrize("kind", TENSORS)
def test_after_a_signal_no_rank_gets_a_wrong_number(comm, kind):
    x = TENSORS[kind](comm)
    x.fill_(comm.rank + 1)
    comm.all_reduce(x)
    assert (x == sum(range(1, comm.size + 1))).all()
    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        if comm.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                comm.all_reduce(x)  # the others are not there yet
        else:
            time.sleep(0.3)
    finally:
        signal.signal(signal.SIGALRM, before)
    words = r"rank 0 left all_reduce at \d\d:\d\d:\d\d with KeyboardInterrupt"
    for call in (
        lambda: comm.all_reduce(x),
        lambda: comm.all_reduce(torch.ones(2)),
        lambda: comm.split(0),
        comm.barrier,
    ):
        refused(comm, call, words)
    comm.close()  # of each rank alone


@pair
@pytest.mark.parametrize("kind", TENSORS)
def test_an_error_of_torch_in_the_middle_is_told_to_the_others(comm, kind, monkeypatch):
    x = TENSORS[kind](comm).fill_(1)
    comm.all_reduce(x)
    comm.barrier()  # a rank that is still in that call would be told in it
    name = "reduce_unseen" if kind == "window" or comm.size > 2 else "reduce_two"
    if comm.rank == 0:
        for module in (all_reduce, sys.modules["commengine.shared_memory.slots"]):
            monkeypatch.setattr(module, name, lambda *_: 1 / 0, raising=False)

    def twice():  # the others may have had all that they needed of the first call
        comm.all_reduce(x), comm.all_reduce(x)

    with pytest.raises(ZeroDivisionError if comm.rank == 0 else CollectiveError) as caught:
        twice()
    if comm.rank:
        assert "rank 0 left all_reduce" in str(caught.value) and not caught.value.in_step
    refused(comm, lambda: comm.all_reduce(x), "rank 0 left all_reduce at .* with ZeroDivisionError: division by zero")


@pair
def test_a_call_that_did_not_begin_can_be_made_again(comm):
    x, spoilt = torch.full((5000,), comm.rank + 1.0), torch.ones(5000)
    comm.all_reduce(torch.ones(5000))
    if comm.rank == 0:
        spoilt.untyped_storage().resize_(0)
        with pytest.raises(CollectiveError, match="without memory") as caught:
            comm.all_reduce(spoilt)
        assert caught.value.in_step
    comm.all_reduce(x)
    assert (x == sum(range(1, comm.size + 1))).all()


@pair
def test_an_error_on_a_stream_is_told_to_the_others(comm, monkeypatch):
    stream, x = comm.new_stream(), torch.ones(5000)
    comm.all_reduce(x, stream=stream).wait()
    comm.barrier()  # a rank that is still in that call would be told in it
    if comm.rank == 0:
        monkeypatch.setattr(all_reduce, "reduce_two" if comm.size == 2 else "_reduce_rows", lambda *_: 1 / 0)
    works = [comm.all_reduce(x, stream=stream) for _ in range(2)]
    with pytest.raises(ZeroDivisionError if comm.rank == 0 else CollectiveError):
        [work.wait() for work in works]
    monkeypatch.undo()
    y = torch.ones(5000)
    comm.all_reduce(y)  # the caller's own calls are another sequence
    assert (y == comm.size).all()


@pair
def test_a_message_that_is_over_is_not_asked_for_again(mpi_world, monkeypatch):
    """A signal that comes while a rank waits is raised after MPI has let go of the message."""
    with Communicator(mpi_world, device="cpu", switch_points=NEVER) as comm:
        lane = comm.new_stream(threaded=False)
        waitall, got = lane.transport.wire.waitall, torch.zeros(4)

        def signalled(*args):
            monkeypatch.setattr(lane.transport.wire, "waitall", waitall)
            waitall(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(lane.transport.wire, "waitall", signalled)
        monkeypatch.setattr(lane.transport.wire, "testall", lambda *_: False)
        work = comm.sendrecv(torch.full((4,), comm.rank + 1.0), (comm.rank + 1) % comm.size, got,
                             (comm.rank - 1) % comm.size, stream=lane)  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        work.wait()
        assert (got == (comm.rank - 1) % comm.size + 1).all()


CHILD = """
import atexit, os, torch
from mpi4py import MPI
from commengine import CollectiveError, Communicator
world = MPI.COMM_WORLD
comm = Communicator(world, device="cpu", timeout=60)
stream, lane, shared = comm.new_stream(), comm.new_stream(threaded=False), comm.empty((1 << 18,))
comm.all_reduce(shared), comm.all_reduce(torch.ones(2))
if world.rank == 0 and os.fork() == 0:
    refused = 0
    for call in (lambda: comm.send(torch.full((3,), -9.0), 1), lambda: comm.all_reduce(torch.ones(2)), comm.barrier,
                 lambda: comm.all_reduce(shared), lambda: comm.barrier(stream=stream), lambda: comm.split(0),
                 lambda: comm.send(torch.ones(3), 1, stream=lane), lambda: comm.empty((3,)),
                 lambda: Communicator(world)):
        try:
            call()
        except CollectiveError as error:
            refused += "forked child" in str(error)
    comm.close()
    os.write(1, f"refused {refused}\\n".encode())  # one write: those of two processes could mix
    atexit._run_exitfuncs()  # those of the parent, too
    os._exit(0)  # mpi4py's own, which sys.exit calls, finalises MPI and waits
if world.rank == 0:
    os.wait()
    comm.send(torch.full((3,), 5.0), 1)
elif world.rank == 1:
    got = torch.zeros(3)
    comm.recv(got, 0)
    os.write(1, f"got {got[0].item()}\\n".encode())
comm.all_reduce(torch.ones(2)), comm.barrier(stream=stream).wait()
comm.close()
"""


@pytest.mark.slow
def test_a_forked_child_does_not_speak_as_its_parent():
    done = mpirun.run(2, "-c", CHILD)
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == ["got 5.0", "refused 9"], done


ENDS = """
import torch, commengine.calls.message_stream, commengine.stream
from mpi4py import MPI
from commengine import Communicator
commengine.stream.EXIT_SECONDS = commengine.calls.message_stream.EXIT_SECONDS = 1.0
comm = Communicator(MPI.COMM_WORLD, device="cpu", timeout=600)
stream = comm.new_stream({how})
if comm.rank == 0:
    {call}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "call"),
    [("", "comm.all_reduce(torch.ones(8), stream=stream)"),
     pytest.param("threaded=False", "comm.recv(torch.ones(8), 1, stream=stream)", marks=pytest.mark.long)],
)  # fmt: skip
def test_a_program_that_ends_before_its_collective_says_so(how, call):
    done = mpirun.run(2, "-c", ENDS.format(how=how, call=call))
    named = call.split("(")[0].removeprefix("comm.")
    assert done.returncode != 0, done
    assert f"rank 0: stream world/stream1: {named}(float32 [8]" in done.stderr and "did every rank" in done.stderr, done


@pair
def test_a_block_belongs_to_its_thread(comm):
    inside, left, seen = threading.Event(), threading.Event(), []

    def blocks():
        with comm.coalesce():
            inside.set()
            left.wait(30)
            comm.send(torch.full((2,), 7.0), (comm.rank + 1) % comm.size)
            comm.recv(got, (comm.rank - 1) % comm.size)
        seen.append(got[0].item())

    got, x = torch.zeros(2), torch.ones(2)
    thread = threading.Thread(target=blocks)
    thread.start()
    inside.wait(30)
    comm.all_reduce(x)
    assert (x == comm.size).all(), "swallowed by the other thread's block"
    comm.all_reduce(x, stream=(stream := comm.new_stream())).wait()
    assert stream and (x == comm.size**2).all()
    left.set()
    thread.join()
    assert seen == [7]


@pair
def test_rows_that_are_counted_are_told_from_rows_that_are_known(mpi_world):
    with Communicator(mpi_world, device="cpu", checked=True, switch_points=NEVER) as comm:
        x, rows = torch.ones(comm.size), [1] * comm.size
        output = torch.empty(comm.size)
        known = (lambda: comm.exchange_rows(output, x, rows), lambda: comm.all_to_all_v(output, x, rows, rows))
        with pytest.raises(CollectiveMismatch, match=r"exchange_rows.*all_to_all_v|all_to_all_v.*exchange_rows"):
            known[min(comm.rank, 1)]()
        assert comm.exchange_rows(torch.empty(comm.size), x, rows) == rows


@pair
@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.quint4x2, torch.float8_e4m3fn])
def test_no_memory_of_a_dtype_that_no_collective_takes(comm, dtype):
    with pytest.raises(CollectiveError, match=f"no collective takes {dtype}"):
        comm.empty((5,), dtype)
    assert comm.empty((5,)).shape == (5,)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_drawn_calls_that_are_left_at_a_drawn_moment(tmp_path):
    """200 of those that ``python -m tests.commengine.calls.drawn`` draws."""
    found = drawn.run(int(os.environ.get("DRAWN_SEED", "1")), range(200), 2, tmp_path / "draws", gentle=True)
    assert not [line for line in (tmp_path / "draws").read_text().splitlines() if '"outcome": "FAIL' in line]
    assert found["told"] > 40 and found["right"] > 40 and sum(found.values()) == 200


@pair
def test_a_stream_of_messages_stops_where_mpi_fails(mpi_world, monkeypatch):
    """MPI may still have the messages, and would match later ones with them."""
    from mpi4py import MPI

    with Communicator(mpi_world, device="cpu", switch_points=NEVER) as comm:
        lane, peer = comm.new_stream(threaded=False), (comm.rank + 1) % comm.size
        wire, kept = lane.transport.wire, lane.transport.wire.waitall

        def fails(*_):
            raise MPI.Exception(MPI.ERR_OTHER)

        monkeypatch.setattr(wire, "testall", lambda *_: False)
        monkeypatch.setattr(wire, "waitall", fails)
        work = comm.sendrecv(torch.ones(4), peer, torch.zeros(4), (comm.rank - 1) % comm.size, stream=lane)
        with pytest.raises(CollectiveError, match="sendrecv"):
            work.wait()
        monkeypatch.setattr(wire, "waitall", kept)
        with pytest.raises(CollectiveError, match="stream world/stream1 stopped at an earlier failure"):
            comm.send(torch.ones(4), peer, stream=lane)
        comm.barrier()  # the caller's own calls go on


@pair
def test_a_block_of_which_something_is_left_stops_the_communicator(mpi_world):
    """The other ranks run the rest: the next call of this one would be taken for it."""
    if mpi_world.size != 2:
        pytest.skip("one message between two ranks")
    with Communicator(mpi_world, device="cpu", switch_points=ALWAYS) as comm:
        x = torch.ones(5000)
        comm.all_reduce(x)

        def block():
            with comm.coalesce():
                comm.send(torch.ones(3), 1) if comm.rank == 0 else comm.recv(torch.ones(5), 0)
                comm.all_reduce(x)

        with pytest.raises(CollectiveError) as caught:
            block()
        assert not caught.value.in_step
        refused(comm, lambda: comm.all_reduce(x), "rank 1 left coalesce at .* got a message of 3")


@pair
def test_the_blocks_of_a_closed_communicator_are_told(comm, monkeypatch):
    part, x = comm.block(comm.size), torch.ones(5000)
    part.all_reduce(x), comm.all_reduce(x)
    comm.barrier()
    if comm.rank == 0:
        monkeypatch.setattr(all_reduce, "reduce_two" if comm.size == 2 else "_reduce_rows", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            comm.all_reduce(x)
        comm.close()
    else:
        refused(part, lambda: part.all_reduce(x), "rank 0 left all_reduce at .* with ZeroDivisionError")


ENDED = """
import time, torch
from mpi4py import MPI
from commengine import Communicator, launch, trace
def main(world):
    shared = world.empty(1 << 18)
    world.all_reduce(shared.fill_(1))
    lane = world.new_stream(threaded=False)
    if world.rank == 0:
        world.send(torch.full((4,), 7.0), 1), world.send(torch.full((4,), 8.0), 1, stream=lane)
    else:
        time.sleep(1)
        one, two = torch.zeros(4), torch.zeros(4)
        with trace(world):
            world.recv(one, 0)
        world.recv(two, 0, stream=lane).wait()
        print(one[0].item(), two[0].item())
launch.run(main)
"""


@pytest.mark.long
@pytest.mark.slow
def test_what_a_rank_sent_before_it_ended_arrives():
    done = mpirun.run(2, "-c", ENDED, fresh=True)
    assert (done.returncode, done.stdout) == (0, "7.0 8.0\n"), done


@pytest.mark.parametrize("package", ["commengine", "tplayers", "trainers", "bench"])
def test_no_number_is_reduced_as_an_object(package):
    """mpi4py would duplicate the communicator, and keep Python's lock while it waits for the other ranks."""
    lower = re.compile(r"\.(allreduce|scan|exscan)\(")
    files = [path for path in (mpirun.ROOT / package).rglob("*.py") if path.parent.name != "peers"]
    assert [str(path) for path in files if lower.search(path.read_text())] == []
