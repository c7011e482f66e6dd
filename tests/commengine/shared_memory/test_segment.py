"""One window that the ranks of a node share: whose memory is where, and when it is unused."""

import pytest
import torch

from commengine.shared_memory.segment import SharedSegment

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_every_rank_sees_every_part(mpi_world, dtype):
    segment = SharedSegment(mpi_world, 1003)  # not a multiple of the element
    mine = segment.tensor(250, dtype).fill_(mpi_world.rank + 1)
    mpi_world.Barrier()
    parts = segment.typed(dtype)
    assert [len(part) for part in parts] == [1003 // dtype.itemsize] * mpi_world.size
    for rank, part in enumerate(parts):
        assert part[:250].eq(rank + 1).all() and part[250:].eq(0).all()
    assert mine.data_ptr() == segment.address == parts[mpi_world.rank].data_ptr()
    mpi_world.Barrier()
    view = mine[1:]
    del mine, part, parts
    assert not segment.unused(), "a view refers to it"
    del view
    assert segment.unused()
    segment.free()
