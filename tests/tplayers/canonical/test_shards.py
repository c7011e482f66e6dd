"""Canonical shards: their numbers and refusals, and sums in the tree."""

import weakref

import pytest
import torch

from commengine import Communicator
from tests.support.exact import in_pairs
from tplayers import CanonicalShards
from tplayers.canonical.shards import require_count, stacked, tree_sum, unstacked

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.every_size]


def test_the_sum_is_a_binary_tree_and_keeps_one_part_of_each_level():
    numbers = [torch.randn(50, generator=torch.Generator().manual_seed(n)) * 3**n for n in range(16)]
    alive, most = [], 0

    def parts():
        nonlocal most
        for number in numbers:
            part = number.clone()
            alive.append(weakref.ref(part))
            most = max(most, sum(one() is not None for one in alive))
            yield part

    assert torch.equal(tree_sum(parts()), in_pairs(numbers))
    assert not torch.equal(in_pairs(numbers), sum(numbers[1:], numbers[0]))
    assert most <= 6  # one for each of the four levels, the new one, and the one before it, which the generator holds


def test_counts_that_do_not_fit(mpi_world):
    with pytest.raises(ValueError, match="6 is not a power of two"):
        require_count(6, 2)
    with pytest.raises(ValueError, match=r"3 ranks does not divide 4; sizes that would: \[1, 2, 4\]"):
        require_count(4, 3)
    if mpi_world.size > 1:
        with Communicator(mpi_world) as comm, pytest.raises(ValueError, match="order='tree', not None"):
            CanonicalShards(4, comm)


def test_shards_side_by_side():
    x = torch.arange(24.0).view(2, 12)
    parts = list(stacked(x, 4))
    assert all(part.is_contiguous() and part.shape == (2, 3) for part in parts)
    assert torch.equal(unstacked(torch.stack(parts)), x)


def test_blocks_of_rows(shards):
    assert shards.blocks(8, split=False) == 4 and shards.blocks(33, split=False) == 1
    assert shards.blocks(8, split=True) == shards.own
    if shards.own > 1:
        with pytest.raises(ValueError, match=r"a sequence of \d+ does not divide into 4 canonical shards"):
            shards.blocks(shards.own * 2 + 1, split=True)


def test_sum_of_rows(shards, alone):
    values = (
        torch.randn(16, 1, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 4, 16)[:, None, None]
    )
    expected = alone.sum_of_rows(values, split=False)
    assert torch.equal(expected, in_pairs([block.sum((0, 1)) for block in values.chunk(4)]))
    assert torch.equal(shards.sum_of_rows(values, split=False), expected)
    mine = values.chunk(shards.comm.size)[shards.comm.rank]
    assert torch.equal(shards.sum_of_rows(mine, split=True), expected)
