"""Reductions in a binary tree of the ranks: the same bits by MPI, in windows, through slots and on a stream."""

import pytest
import torch

from commengine import CollectiveError, Communicator
from commengine.shared_memory import slots as bounce
from tests.support.exact import ALWAYS, NEVER, in_pairs, ops_of, values

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
by_dtype = pytest.mark.parametrize("dtype", TYPES, ids=str)


def parts_of(dtype, numel, size):
    """Numbers whose sum depends on the order."""
    seeds = [torch.Generator().manual_seed(rank) for rank in range(size)]
    return [(torch.randn(numel, dtype=torch.float64, generator=seed) * 3**k).to(dtype) for k, seed in enumerate(seeds)]


@pytest.fixture(scope="module")
def trees(mpi_world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounce, "SLOT_BYTES", 8192)
        with (
            Communicator(mpi_world, order="tree", switch_points=NEVER) as by_mpi,
            Communicator(mpi_world, order="tree", switch_points=ALWAYS) as by_memory,
        ):
            yield by_mpi, by_memory


@by_dtype
@pytest.mark.parametrize("numel", [1, 8, 40_012])
def test_sums(trees, dtype, numel):
    by_mpi, by_memory = trees
    size, rank = by_mpi.size, by_mpi.rank
    parts = parts_of(dtype, numel * size, size)
    right = in_pairs(parts)
    if size == 4 and numel > 1:  # the control: these numbers do depend on the order
        assert not torch.equal(right, ((parts[0] + parts[1]) + parts[2]) + parts[3])
    window = by_memory.empty((numel * size,), dtype)
    for group, tensor in ((by_mpi, window.clone()), (by_memory, window.clone()), (by_memory, window)):
        stream = group.new_stream() if tensor is not window else None
        for lane in (None, stream):
            tensor.copy_(parts[rank])
            group.all_reduce(tensor, stream=lane).wait()
            assert torch.equal(tensor, right)
            own = torch.empty(numel, dtype=dtype)
            tensor.copy_(parts[rank])
            group.reduce_scatter(own, tensor, stream=lane).wait()
            assert torch.equal(own, right.view(size, -1)[rank])
            assert torch.equal(tensor, parts[rank])
        group.reduce(tensor, size - 1)
        assert torch.equal(tensor, right if rank == size - 1 else parts[rank])


@by_dtype
def test_other_reductions(trees, dtype):
    """Products and means in the same tree; maxima and minima, which have no order."""
    for group in trees:
        for op in ops_of(dtype):
            parts = [values(dtype, 501, rank) for rank in range(group.size)]
            tensor = parts[group.rank].clone()
            group.all_reduce(tensor, op)
            if op == "avg":
                right = in_pairs(parts) / group.size
            else:
                right = getattr(torch.stack(parts), {"max": "amax", "min": "amin"}.get(op, op))(0)
            assert torch.equal(tensor, right), op


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_exact_types_need_no_tree(trees, dtype):
    for group in trees:
        tensor = values(dtype, 501, group.rank)
        group.all_reduce(tensor)
        wide = torch.stack([values(dtype, 501, rank) for rank in range(group.size)])
        assert torch.equal(tensor, wide.any(0) if dtype == torch.bool else wide.sum(0).to(dtype))


def test_a_rank_may_have_added_up_its_own_pairs(trees):
    """Twice as many parts on half as many ranks, as in a group that is split."""
    by_mpi, _ = trees
    parts = parts_of(torch.bfloat16, 999, 2 * by_mpi.size)
    mine = in_pairs(parts[2 * by_mpi.rank : 2 * by_mpi.rank + 2])
    by_mpi.all_reduce(mine)
    assert torch.equal(mine, in_pairs(parts))


def test_a_part_keeps_the_order(trees):
    by_mpi, _ = trees
    with by_mpi.split(0, -by_mpi.rank) as backwards:
        assert backwards.order == "tree"
        parts = parts_of(torch.float32, 999, by_mpi.size)
        mine = parts[by_mpi.rank].clone()
        backwards.all_reduce(mine)
        assert torch.equal(mine, in_pairs(parts[::-1]))


def test_unknown_order(mpi_world):
    with pytest.raises(CollectiveError, match="order='random' is not one of None, rank, tree"):
        Communicator(mpi_world, order="random")
