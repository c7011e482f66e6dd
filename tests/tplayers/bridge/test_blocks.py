"""The points that two programs share: each once, whatever their blocks."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from commengine import Decomposition
from commengine.decomposition import grid_coords
from tests.tplayers.bridge.test_bridge import blocks
from tplayers.bridge import bridge, include
from tplayers.bridge.blocks import WORDS, BridgeField, shared_parts


@pytest.mark.parametrize("number", range(20))
def test_each_point_crosses_once(number):
    rng = random.Random(number)
    points = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
    ours, theirs = rng.randint(1, 6), rng.randint(1, 6)
    field, other = (BridgeField(blocks(rng, points, n)) for n in (ours, theirs))
    words = np.array([other.words(rank) for rank in range(theirs)])
    assert words.shape[1] == WORDS
    came = torch.zeros(points)
    for rank in range(ours):
        mine = came[field.decomposition.slices(grid_coords(rank, field.decomposition.grid_shape))]
        for part in shared_parts(field, rank, words):
            mine[part.at] += 1
            sent = [
                p
                for p in shared_parts(other, part.peer, np.array([field.words(r) for r in range(ours)]))
                if p.peer == rank
            ]
            assert [tuple(s.stop - s.start for s in p.at[1:]) for p in sent] == [
                tuple(s.stop - s.start for s in part.at[1:])
            ]
    assert bool((came == 1).all())


def boxes(*several):
    rows = []
    for start, stop in several:
        rows.append([2, 1, 8, 4, 4, 0, 0, *start, 0, 0, *stop, 0, 0])
    return np.array(rows)


@pytest.mark.parametrize(
    "several",
    [
        [((0, 0), (4, 3))],  # a column is missing
        [((0, 0), (4, 4)), ((1, 1), (2, 2))],  # a point is there twice
        [((0, 0), (2, 4)), ((1, 0), (3, 4))],  # as many points as there are, some twice and some missing
        [((0, 0), (4, 4)), ((4, 0), (5, 4))],  # beyond the field
        [((0, 0), (2, 2)), ((0, 2), (2, 4)), ((2, 0), (4, 2)), ((1, 2), (4, 4))],
    ],
)
def test_blocks_that_do_not_tile_the_field(several):
    field = BridgeField(Decomposition([(4,), (4,)]))
    with pytest.raises(ValueError, match=r"do not have each of the \[4, 4\] points once"):
        shared_parts(field, 0, boxes(*several))


def test_blocks_in_any_order_that_tile_the_field():
    """A wheel of blocks, which no grid has."""
    field = BridgeField(Decomposition([(4,), (4,)]))
    wheel = boxes(
        ((0, 0), (1, 3)), ((0, 3), (3, 4)), ((3, 1), (4, 4)), ((1, 0), (4, 1)), ((1, 1), (3, 3)), ((4, 4), (4, 4))
    )
    assert len(shared_parts(field, 0, wheel)) == 5


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (lambda: BridgeField(Decomposition([(1,)] * 5)), "1 to 4 axes, not 5"),
        (lambda: BridgeField(Decomposition([(1,)]), dtype=torch.float16), "must be float32 or float64"),
    ],
)
def test_fields_that_cannot_cross(field, words):
    with pytest.raises(ValueError, match=words):
        field()


def test_the_header_has_at_most_100_lines_and_the_same_numbers():
    text = Path(include(), "commengine_bridge.h").read_text()
    assert len(text.splitlines()) <= 100
    names = {"VERSION": bridge.VERSION, "WORDS": 2 * WORDS}
    names |= {
        name: getattr(bridge, f"_{name}") for name in ("ASK", "ANSWER", "DATA", "END", "CALL", "GRADIENT", "FORGET")
    }
    for name, value in names.items():
        assert f"BRIDGE_{name} = {value}" in text
