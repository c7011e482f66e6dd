"""Exchanges of unequal parts, and arrays that are spread over the ranks, on 1, 2 and 4 ranks."""

import numpy as np
import pytest

from trainers.cleaning.exchange import Numbering, exchange, reduced, split_by

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64, np.float32])
def test_parts_of_any_length_arrive(world, dtype):
    def part(source, to):
        return (np.arange((3 * source + to) % 4 * 1000) * (source + 1) + to).astype(dtype)

    arrived = exchange(world, [part(world.rank, to) for to in range(world.size)])
    for source, found in enumerate(arrived):
        assert found.dtype == dtype and np.array_equal(found, part(source, world.rank))
    assert not any(len(found) for found in exchange(world, [part(0, 0)] * world.size))


def test_values_are_looked_up_where_they_are_held(world):
    held = [5, 0, 7, 3][world.rank]
    numbering = Numbering(world, held)
    assert numbering.count == sum([5, 0, 7, 3][: world.size]) and numbering.held == held
    mine = np.arange(numbering.first, numbering.first + held)
    assert (numbering.owners(mine) == world.rank).all()
    rng = np.random.default_rng(world.rank)
    numbers = rng.integers(0, numbering.count, 50 * world.rank)  # rank 0 asks for nothing
    assert np.array_equal(numbering.lookup(mine**2, numbers), numbers**2)


def test_rows_go_to_their_owners(world):
    numbering = Numbering(world, 4)
    numbers = np.random.default_rng(world.rank).integers(0, numbering.count, 30)
    local, beside, source = numbering.to_owners(numbers, numbers * 1.5, np.full(30, world.rank))
    assert np.array_equal((local + numbering.first) * 1.5, beside)
    assert ((local >= 0) & (local < 4)).all() and (np.diff(source) >= 0).all()
    assert reduced(world, len(local)) == 30 * world.size


def test_sums(world):
    assert reduced(world, world.rank + 1) == world.size * (world.size + 1) // 2
    assert reduced(world, -world.rank, "max") == 0


def test_parts_by_owner(world):
    numbers, letters = split_by(np.array([2, 0, 2, 0]), 4, np.array([1, 2, 3, 4]), np.array(list("abcd")))
    assert [part.tolist() for part in numbers] == [[2, 4], [], [1, 3], []]
    assert ["".join(part) for part in letters] == ["bd", "", "ac", ""]
