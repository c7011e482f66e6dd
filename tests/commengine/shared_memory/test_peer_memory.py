"""Memory of another process: what is read, from where to where, and the ranks' answer where one may not."""

import ctypes
import random

import pytest
import torch

from commengine.errors import TransferError
from commengine.shared_memory import peer_memory
from commengine.shared_memory.peer_memory import PeerMemory

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2)]

NBYTES = 700_000


@pytest.fixture(scope="module")
def peers(mpi_world):
    found = PeerMemory.find(mpi_world)
    if found is None:
        pytest.skip("the kernel does not let a rank read another one's memory")
    return found


def test_reads_from_any_address_to_any_address(mpi_world, peers):
    """Offsets of 1 to 15 bytes behind the source go through other memory, and so do several stretches of it."""
    n, me, draw = mpi_world.size, mpi_world.rank, random.Random(2)
    mine = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(me))
    peer = (me + 1) % n
    theirs = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(peer))
    addresses, memory = mpi_world.allgather(mine.data_ptr()), torch.empty(NBYTES + 8192, dtype=torch.uint8)
    for case in range(60):
        nbytes = draw.choice((0, 1, 4096, 4097, 300_001, draw.randrange(NBYTES)))
        start = draw.randrange(NBYTES - nbytes)
        behind = draw.choice((0, 1, 7, 15, 16, draw.randrange(4096)))
        at = (addresses[peer] + start + behind - memory.data_ptr()) % 4096
        memory.fill_(7)
        peers.read(peer, memory.data_ptr() + at, addresses[peer] + start, nbytes)
        assert torch.equal(memory[at : at + nbytes], theirs[start : start + nbytes]), case
        assert memory[:at].eq(7).all() and memory[at + nbytes :].eq(7).all(), case
    mpi_world.Barrier()


def test_memory_that_is_not_there_is_an_error(mpi_world, peers):
    target = ctypes.create_string_buffer(8)
    with pytest.raises(TransferError, match=r"the memory of process \d+ cannot be read: Bad address"):
        peers.read(0, ctypes.addressof(target), 4096, 8)
    with pytest.raises(TransferError, match="No such process"):
        PeerMemory([2**22 + 1]).read(0, ctypes.addressof(target), 4096, 8)
    mpi_world.Barrier()


@pytest.mark.parametrize("fault", ["forbidden", "another process", "not there"])
def test_no_rank_reads_where_one_may_not(mpi_world, peers, monkeypatch, fault):
    """A rank that reads another number than its peer wrote has another process of that number before it."""
    if mpi_world.rank == mpi_world.size - 1:
        if fault == "not there":
            monkeypatch.setattr(peer_memory, "_read", None)
        elif fault == "forbidden":
            monkeypatch.setattr(peer_memory, "_read", lambda *_: -1)
        else:
            monkeypatch.setattr(peer_memory, "_read", lambda *_: 8)
    assert PeerMemory.find(mpi_world) is None
