"""Decomposition against numpy.array_split."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commengine import CollectiveError, Decomposition


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 7)), min_size=1, max_size=3))
def test_even_blocks_are_those_of_array_split(axes):
    shape, grid = [n for n, _ in axes], [p for _, p in axes]
    parts = Decomposition.even(shape, grid)
    whole = [np.array_split(np.arange(n), p) for n, p in axes]
    assert (parts.shape, parts.grid_shape) == (tuple(shape), tuple(grid))
    for coords in itertools.product(*map(range, grid)):
        expected = [pieces[c] for pieces, c in zip(whole, coords, strict=True)]
        assert parts.local_shape(coords) == tuple(map(len, expected))
        for n, piece, span in zip(shape, expected, parts.slices(coords), strict=True):
            assert np.arange(n)[span].tolist() == piece.tolist()
    for axis, pieces in enumerate(whole):
        for c, piece in enumerate(pieces):
            assert [parts.owner(axis, int(position)) for position in piece] == [c] * len(piece)


def test_blocks_of_any_size():
    parts = Decomposition(blocks=[[3, 0, 1], np.array([2, 5])])
    assert parts == Decomposition(((3, 0, 1), (2, 5)))
    assert hash(parts) == hash(Decomposition(((3, 0, 1), (2, 5))))
    assert (parts.shape, parts.grid_shape, parts.points()) == ((4, 7), (3, 2), 28)
    assert (parts.bounds(0), parts.bounds(1)) == ((0, 3, 3, 4), (0, 2, 7))
    assert parts.local_shape((1, 1)) == (0, 5)
    assert parts.slices((2, 1)) == (slice(3, 4), slice(2, 7))
    assert [parts.owner(0, i) for i in range(4)] == [0, 0, 0, 2]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Decomposition(((2, -1),)), r"blocks \[2, -1\] of axis 0"),
        (lambda: Decomposition(((2,), ())), r"blocks \[\] of axis 1"),
        (lambda: Decomposition((2, 3)), "not sizes for each axis"),
        (lambda: Decomposition(((1.5,),)), "not sizes for each axis"),
        (lambda: Decomposition.even((4, 4), (2,)), r"shape \[4, 4\] cannot be cut into \[2\] blocks"),
        (lambda: Decomposition.even((4,), (0,)), r"cut into \[0\] blocks"),
        (lambda: Decomposition.even((-4,), (1,)), r"shape \[-4\]"),
        (lambda: Decomposition.even((4,), (2,)).slices((2,)), r"\[2\] is not a place of a grid of shape \[2\]"),
        (lambda: Decomposition.even((4,), (2,)).local_shape((0, 0)), r"\[0, 0\] is not a place"),
        (lambda: Decomposition.even((4,), (2,)).local_shape((-1,)), r"\[-1\] is not a place"),
        (lambda: Decomposition.even((4,), (2,)).owner(0, 4), "position 4 is not on axis 0, which has 4 points"),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(CollectiveError, match=words):
        make()
