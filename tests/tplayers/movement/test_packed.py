"""The buffers of transfers: kept, used by one transfer at a time, and let go."""

import threading
import time

import pytest
import torch

from commengine import CartesianGrid, Communicator, Decomposition
from tplayers.movement import packed
from tplayers.movement.halo import plan_halo
from tplayers.movement.packed import _SWEPT
from tplayers.movement.transfer import start_transfer, transfer

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def ring(mpi_world):
    """A communicator, and the plan of a halo of one point around a periodic line of 3 points a rank."""
    with Communicator(mpi_world, device="cpu") as comm:
        grid = CartesianGrid(comm, (comm.size,), periodic=True)
        yield comm, plan_halo(grid, Decomposition(((3,) * comm.size,)), 1)


def field(comm, *lead, turn=0):
    return torch.arange(3.0).expand(*lead, 3) + 10 * comm.rank + 1000 * turn


def with_halo(comm, *lead, turn=0):
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    row = [2.0 + 10 * left, *(number + 10.0 * comm.rank for number in range(3)), 10.0 * right]
    return torch.tensor(row).expand(*lead, 5) + 1000 * turn


def sets(owner):
    return sum(map(len, owner.kept[packed.__name__].values()))


def test_equal_transfers_share_their_buffers_one_after_the_other(ring):
    comm, plan = ring
    for turn in range(5):
        assert torch.equal(transfer(field(comm, 2, turn=turn), plan, comm), with_halo(comm, 2, turn=turn))
        assert sets(comm) == 1
    with torch.inference_mode():
        transfer(field(comm, 2), plan, comm)
    x = field(comm, 2).requires_grad_()
    transfer(x, plan, comm).sum().backward()
    assert sets(comm) == 2  # and those of the transposed transfer
    transfer(field(comm, 3), plan, comm)
    transfer(field(comm, 2).double(), plan, comm)
    assert sets(comm) == 4


@pytest.mark.parametrize("threaded", [True, False])
def test_a_transfer_that_begins_while_an_equal_one_is_under_way_has_buffers_of_its_own(ring, threaded):
    comm, plan = ring
    stream = comm.new_stream(threaded=threaded)
    for _ in range(2):
        begun = [start_transfer(field(comm, 2, turn=turn), plan, comm, stream) for turn in range(3)]
        for turn, one in enumerate(begun):
            assert torch.equal(one.wait(), with_halo(comm, 2, turn=turn))
        assert sets(stream) == 3
    kept, threads = stream.kept, threading.active_count()
    stream.close()
    assert kept == {} and threading.active_count() == threads - threaded


def test_a_dropped_stream_takes_its_buffers_along(ring):
    comm, plan = ring
    for threaded in (True, False):
        stream, threads = comm.new_stream(threaded=threaded), threading.active_count()
        start_transfer(field(comm, 2), plan, comm, stream).wait()
        kept = stream.kept
        with pytest.warns(ResourceWarning, match="was dropped and not closed"):
            del stream
        comm.barrier()
        assert kept == {}
        while threading.active_count() > threads - threaded:
            time.sleep(1e-3)


def test_what_is_not_used_any_more_is_let_go(ring):
    comm, plan = ring
    wire = comm._host.wire
    transfer(field(comm, 7), plan, comm)
    for _ in range(2 * _SWEPT):
        transfer(field(comm, 2), plan, comm)
    assert sets(comm) == 1 and len(comm.kept[packed.__name__]) == 1
    transfer(field(comm, 4), plan, comm)  # a new exchange frees the requests of those that are gone
    assert len(wire.prepared) == 2
    comm.close()
    assert wire.prepared == {} and comm.kept == {}
