"""Halo formulas against the paper's, and against a count of every point. tests/tplayers/movement has the traces."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commengine import Decomposition
from commengine.cost import Link, block_halo, halo_exchange_cost, least_halo_grid, repartition_cost


def counted(decomposition, ranges, periodic):
    """For each pair of ranks the points that go from one to the other, each looked at by itself."""
    places = list(itertools.product(*map(range, decomposition.grid_shape)))
    moved = np.zeros((len(places), len(places)), dtype=int)
    for receiver, coords in enumerate(places):
        for point in itertools.product(*(range(*ends[c]) for ends, c in zip(ranges, coords, strict=True))):
            owner = []
            for axis, (position, extent) in enumerate(zip(point, decomposition.shape, strict=True)):
                if periodic[axis] and extent:
                    position %= extent
                if 0 <= position < extent:
                    owner.append(decomposition.owner(axis, position))
            if len(owner) == len(point):
                moved[places.index(tuple(owner)), receiver] += 1
    np.fill_diagonal(moved, 0)
    return places, moved


@given(st.data())
def test_every_point_counts_once(data):
    axes = data.draw(st.integers(1, 2))
    blocks = [tuple(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))) for _ in range(axes)]
    decomposition = Decomposition(tuple(blocks))
    periodic = [data.draw(st.booleans()) for _ in range(axes)]
    widths = [(data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))) for _ in range(axes)]
    ranges = decomposition.halo_ranges(widths)
    places, moved = counted(decomposition, ranges, periodic)
    for rank, coords in enumerate(places):
        block = block_halo(decomposition, coords, ranges, periodic)
        assert block.points == math.prod(decomposition.local_shape(coords))
        assert (block.received, block.sent) == (moved[:, rank].sum(), moved[rank].sum())
        assert block.messages == np.count_nonzero(moved[:, rank])
    cost = halo_exchange_cost(decomposition, widths, 8, periodic)
    assert cost.total_bytes == 8 * moved.sum()
    assert cost.path_bytes == 8 * max(moved.sum(0).max(), moved.sum(1).max())


def test_inside_a_grid_it_is_the_formula():
    """(n1 + 2w)(n2 + 2w) - n1 n2, from 8 neighbours; 6 / n for the faces of a cube of n^3 points."""
    decomposition = Decomposition.even((30, 60), (3, 3))
    block = block_halo(decomposition, (1, 1), decomposition.halo_ranges([(2, 2), (2, 2)]))
    assert (block.points, block.received, block.messages) == (200, 14 * 24 - 200, 8)
    cube = Decomposition.even((300, 300, 300), (3, 3, 3))
    for axis in range(3):
        widths = [(0, 0)] * 3
        widths[axis] = (1, 1)
        assert block_halo(cube, (1, 1, 1), cube.halo_ranges(widths)).surface_to_volume == pytest.approx(2 / 100)


def test_least_halo_grids():
    """A square is cut in both axes, a long field across its long axis; a halo along one axis alone needs no other."""
    ones = [(1, 1), (1, 1)]
    assert least_halo_grid((512, 512), 4, ones) == (2, 2)
    assert least_halo_grid((16, 4096), 4, ones) == (1, 4)
    assert least_halo_grid((512, 512), 2, ones) == (2, 1)
    assert least_halo_grid((512, 512), 4, [(1, 1), (0, 0)]) == (1, 4)
    assert least_halo_grid((64, 64, 64), 8, [(1, 1)] * 3) == (2, 2, 2)


def test_repartition_is_an_all_to_all():
    """From slabs to pencils each of p ranks keeps 1/p of its block."""
    slabs, pencils = Decomposition.even((64, 32), (4, 1)), Decomposition.even((64, 32), (1, 4))
    cost = repartition_cost(slabs, pencils, 8)
    assert (cost.steps, cost.sent_bytes, cost.total_bytes) == (3, 8 * 512 * 3 / 4, 8 * 2048 * 3 / 4)
    assert repartition_cost(slabs, slabs, 8).seconds(Link(1, 1)) == 0
