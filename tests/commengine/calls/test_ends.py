"""The end of MPI, of a stream and of a communicator that nobody closes: nothing hangs, and nothing is left."""

import copy
import gc
import threading
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch

from commengine import CollectiveError, Communicator
from tests.support import mpirun

FINALISES = """
import os, sys, torch
from mpi4py import MPI
from commengine import CollectiveError, Communicator
world, timed, flying = MPI.COMM_WORLD, "timed" in sys.argv, "flying" in sys.argv
comm = Communicator(world, device="cpu", timeout=60 if timed else None)
stream, lane, shared = comm.new_stream(), comm.new_stream(threaded=False), comm.empty(1 << 18)
comm.all_reduce(shared.fill_(1))
x, got, peer = torch.ones(1 << 20), torch.zeros(4), 1 - world.rank
works = [comm.all_reduce(x, stream=stream), comm.sendrecv(torch.ones(4), peer, got, peer, stream=lane)]
if not flying:
    [work.wait() for work in works]
MPI.Finalize()
refused = 0
for call in (lambda: comm.all_reduce(shared), lambda: comm.all_reduce(torch.ones(2)), lambda: comm.empty(3),
             lambda: comm.barrier(stream=stream), lambda: comm.send(got, peer, stream=lane), lambda: comm.split(0),
             lambda: comm.compare("words"), lambda: Communicator(world)):
    try:
        call()
    except CollectiveError as error:
        refused += "finalised" in str(error)
[work.wait() for work in works]
comm.close()
os.write(1, f"{refused} {x[0].item()} {got[0].item()}\\n".encode())  # one write: those of two ranks could mix
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", ["timed flying", pytest.param("timed", marks=pytest.mark.long),
                                   pytest.param("flying", marks=pytest.mark.long)])  # fmt: skip
def test_a_program_may_finalise_mpi_while_communicators_are_open(words):
    done = mpirun.run(2, "-c", FINALISES, *words.split())
    assert (done.returncode, done.stdout) == (0, "8 2.0 1.0\n" * 2), done


@pytest.mark.mpi(min_size=2)
def test_a_closed_stream_leaves_nothing(mpi_world):
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    with Communicator(mpi_world, device="cpu") as comm:
        for number in range(1, 41):
            stream = comm.new_stream(threaded=number % 2 == 0)
            if number % 2 == 0:
                comm.barrier(stream=stream).wait()
            stream.close()
            stream.close()
            assert stream.name == f"world/stream{number}"
        with pytest.raises(CollectiveError, match="stream world/stream40 is closed"):
            comm.barrier(stream=stream)
        assert comm._streams == [] and threading.active_count() == threads
        assert len(list(Path("/proc/self/fd").iterdir())) <= files + 2
        assert (comm.empty(8).shape, comm.new_stream().index) == ((8,), 41)


@pytest.mark.mpi(min_size=2)
def test_the_end_of_a_stream_tells_a_failure_that_nobody_waited_for(mpi_world, monkeypatch):
    with Communicator(mpi_world, device="cpu") as comm:
        stream = comm.new_stream()
        stream.enqueue(lambda: 1 / 0)
        with pytest.raises(CollectiveError, match="failed on world/stream1, and nobody waited: division by zero"):
            stream.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, only=True)
def test_a_dropped_stream_warns_and_ends_its_thread_after_its_collectives(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads, peer, works = threading.active_count(), 1 - comm.rank, []
        for number in range(20):
            tensor = torch.full((4,), float(number))
            stream = comm.new_stream(threaded=number % 2 == 0)
            if number % 2 == 0:
                works.append((comm.all_reduce(tensor, stream=stream), tensor, 2.0 * number))
            else:
                received = torch.empty(4)
                works.append((comm.sendrecv(tensor, peer, received, peer, stream=stream), received, float(number)))
        del stream
        for work, tensor, result in works:
            work.wait()
            assert tensor.tolist() == [result] * 4
        gc.collect()
        _await_threads(threads)
        said = sorted(str(one.message).split(" was")[0] for one in caught if one.category is ResourceWarning)
        assert said == sorted(f"stream world/stream{number}" for number in range(1, 21))
        comm.empty(8)  # its streams are asked, too
        assert comm.all_reduce(torch.ones(1), stream=comm.new_stream()).wait() is None


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, only=True)
def test_messages_that_nobody_waits_for_may_be_in_a_dropped_stream(mpi_world):
    received = torch.zeros(4)
    with warnings.catch_warnings(record=True) as caught, Communicator(mpi_world, device="cpu") as comm:
        warnings.simplefilter("always")
        stream, peer = comm.new_stream(threaded=False), 1 - comm.rank
        comm.sendrecv(torch.full((4,), 3.0 + comm.rank), peer, received, peer, stream=stream)
        assert copy.copy(stream) is stream
        del stream
        comm.barrier()
    assert received.tolist() == [3.0 + peer] * 4
    assert [str(one.message).split(" was")[0] for one in caught] == ["stream world/stream1"]


@pytest.mark.mpi(min_size=2)
def test_what_a_closed_stream_held_goes_although_its_failure_was_told_there(mpi_world):
    def fails(comm):
        stream, large = comm.new_stream(), torch.zeros(1000)
        with pytest.raises(ZeroDivisionError):
            stream.enqueue(lambda: 1 / 0).wait()
        stream.close()
        return weakref.ref(stream), weakref.ref(large)

    with Communicator(mpi_world, device="cpu") as comm:
        kept = fails(comm)
        gc.collect()
        assert [one() for one in kept] == [None, None]


@pytest.mark.mpi(min_size=2)
def test_a_dropped_communicator_warns_and_ends_its_threads(mpi_world):
    threads = threading.active_count()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            comm = Communicator(mpi_world, device="cpu", timeout=60)
            streams = [comm.new_stream(), comm.new_stream(threaded=False)]
            comm.all_reduce(torch.ones(2), stream=streams[0]).wait()
            del comm  # before its streams
        del streams
        gc.collect()
        _await_threads(threads)
    said = [str(one.message) for one in caught if one.category is ResourceWarning]
    assert [one.split(" was")[0] for one in said] == ["Communicator 'world'"] * 5, said


def _await_threads(count):
    deadline = time.monotonic() + 20
    while threading.active_count() > count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= count
