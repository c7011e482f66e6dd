"""A ring and a gather of blocks over NCCL: the real CuPy and a libnccl of ours on host memory; skipped without them.

Streams run at the same time, as a GPU's do. A block for which nobody waits is NaN. The libnccl blocks the host until
both ranks of a pair have come to their first message, as NCCL does, and a rank that never comes is an error.
"""

import pytest
import torch

from tests.support.device.device_stand_in import communicator_stand_in, on_device
from tests.support.device.eager_streams import EagerRuns
from tplayers.context import exchanges
from tplayers.context.exchanges import GatheredExchange, RingExchange
from tplayers.context.group import ContextGroup

pytestmark = pytest.mark.mpi(min_size=2)

SHAPE = (2, 3, 5)


def block(owner):
    return torch.arange(30.0, dtype=torch.float64).reshape(SHAPE) + 100 * owner


@pytest.fixture
def device(mpi_world, monkeypatch):
    """A communicator of stand-ins, and what waits for its streams."""
    # With an order of launches NCCL lets them overlap from CUDA 12.3 on. The libnccl runs them one after the other.
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    comm, runtime = communicator_stand_in(monkeypatch, mpi_world)
    EagerRuns(runtime.cuda)

    def unfilled(like):
        return on_device(torch.full(like.shape, torch.nan, dtype=like.dtype))

    def settle():
        runtime.cuda.current_stream().synchronize()

    def received(message, original=exchanges._received):
        found = original(message)
        settle()  # sums are computed at once here, so that they wait for what their stream waits for
        return found

    monkeypatch.setattr(exchanges.torch, "empty_like", unfilled)
    monkeypatch.setattr(exchanges, "_received", received)
    return comm, settle


@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_all_blocks_come_and_their_gradients_go_back(device, kind):
    comm, settle = device
    rank, size = comm.rank, comm.size
    streams = [comm.new_stream() for _ in range(2 if kind == "ring" else 1)]
    for repeat in range(3):
        exchange = RingExchange(comm, *streams) if kind == "ring" else GatheredExchange(comm, *streams)
        mine, owners, kept = on_device(block(rank) + repeat), [], []
        for owner, found in exchange.blocks(mine):
            settle()
            owners.append(owner)
            assert torch.equal(found.as_subclass(torch.Tensor), block(owner) + repeat), (repeat, owner)
            kept.append(found)  # a stand-in needs the memory of what is sent to the end
            if owner != rank:
                gradient = on_device(torch.full(SHAPE, 10.0**rank, dtype=torch.float64) * (owner + 1))
                kept.append(gradient)
                exchange.add(owner, gradient)
        assert owners == [(rank - step) % size for step in range(size)]
        total = exchange.total()
        settle()
        others = sum(10.0**other for other in range(size) if other != rank)
        assert torch.equal(total.as_subclass(torch.Tensor), torch.full(SHAPE, others * (rank + 1), dtype=torch.float64))
    comm.close()


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_a_group_without_threads_has_them_for_device_tensors_that_mpi_carries(mpi_world, monkeypatch, method):
    comm, _ = communicator_stand_in(monkeypatch, mpi_world, "staged")
    with comm:
        exchange = ContextGroup(comm, method, threaded=False)._exchange()
        for owner, found in exchange.blocks(on_device(block(comm.rank))):
            assert torch.equal(found.as_subclass(torch.Tensor), block(owner))
