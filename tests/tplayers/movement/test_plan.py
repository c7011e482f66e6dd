"""Plans of halo exchanges and repartitions, played in one process against numpy.pad of the whole field."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commengine import Decomposition
from tplayers.movement.plan import halo_plan, repartition_plan

#: numpy's names
MODES = {"zeros": "constant", "circular": "wrap", "reflect": "reflect", "replicate": "edge"}


def play(source, plans, whole):
    """The new blocks of all ranks, and the points that went from rank to rank."""
    places = list(itertools.product(*map(range, source.grid_shape)))
    blocks = [whole[(..., *source.slices(place))] for place in places]
    sent = {}
    for rank, plan in enumerate(plans):
        assert blocks[rank].shape[-len(plan.source_shape) :] == plan.source_shape
        for peer, pieces in plan.sends:
            sent[rank, peer] = [blocks[rank][piece.source].clone() for piece in pieces]
    made = []
    for rank, plan in enumerate(plans):
        out = whole.new_full((*whole.shape[: -len(plan.target_shape)], *plan.target_shape), math.nan)
        written = torch.zeros(plan.target_shape, dtype=torch.int64)
        parts = [(piece, blocks[rank][piece.source]) for piece in plan.kept]
        for peer, pieces in plan.receives:
            message = sent.pop((peer, rank))
            assert [tuple(part.shape[-len(piece.shape) :]) for piece, part in zip(pieces, message, strict=True)] == [
                piece.shape for piece in pieces
            ]
            parts += zip(pieces, message, strict=True)
        for piece, part in parts:
            out[piece.target] = part.flip(piece.flipped)
            written[piece.target] += 1
        assert written.max() <= 1 if written.numel() else True
        assert plan.filled == bool((written == 1).all())
        made.append(out.nan_to_num(0.0))
    assert not sent
    return made


@st.composite
def cases(draw):
    """(source, widths, paddings): blocks of any sizes on 1 to 3 axes, empty ones too, and any halos."""
    blocks, widths, paddings = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
        n = sum(sizes)
        padding = draw(st.sampled_from(("zeros", "circular", "reflect", "replicate") if n else ("zeros",)))
        most = n - 1 if padding == "reflect" else 6
        blocks.append(tuple(sizes))
        widths.append((draw(st.integers(0, most)), draw(st.integers(0, most))))
        paddings.append(padding)
    return Decomposition(tuple(blocks)), widths, paddings


@settings(deadline=None)
@given(cases())
def test_halos_are_those_of_the_padded_field(case):
    source, widths, paddings = case
    size = math.prod(source.grid_shape)
    whole = torch.arange(1.0, 1 + 2 * source.points()).reshape(2, *source.shape)
    padded = whole.numpy()
    for axis, (ends, mode) in enumerate(zip(widths, paddings, strict=True), start=1):
        padded = np.pad(padded, [ends if axis == other else (0, 0) for other in range(padded.ndim)], MODES[mode])
    padded = torch.from_numpy(padded)
    ranges = source.halo_ranges(widths)
    plans = [halo_plan(source, rank, ranges, paddings) for rank in range(size)]
    for place, made in zip(itertools.product(*map(range, source.grid_shape)), play(source, plans, whole), strict=True):
        spans = [
            slice(span.start, span.stop + low + high)
            for span, (low, high) in zip(source.slices(place), widths, strict=True)
        ]
        assert torch.equal(made, padded[(..., *spans)])


@settings(deadline=None)
@given(st.data())
def test_any_ranges(data):
    """Ranges that are smaller than the blocks, or lie elsewhere: as strided convolutions and poolings ask for them."""
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    source, n = Decomposition((tuple(sizes),)), sum(sizes)
    whole = torch.arange(1.0, 1 + n)
    padded = torch.cat([torch.zeros(10), whole, torch.zeros(10)])
    ranges = []
    for _ in sizes:
        start = data.draw(st.integers(-8, n + 5))
        ranges.append((start, start + data.draw(st.integers(0, min(8, n + 9 - start)))))
    plans = [halo_plan(source, rank, [ranges], ["zeros"]) for rank in range(len(sizes))]
    for (start, stop), made in zip(ranges, play(source, plans, whole), strict=True):
        assert torch.equal(made, padded[start + 10 : stop + 10])


@settings(deadline=None)
@given(st.data())
def test_repartition(data):
    shape = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    size = data.draw(st.integers(1, 6))

    def decomposition():
        factors = [1] * len(shape)
        left = size
        for axis in range(len(shape) - 1):
            factors[axis] = data.draw(st.sampled_from([f for f in range(1, left + 1) if left % f == 0]))
            left //= factors[axis]
        factors[-1] = left
        blocks = []
        for n, p in zip(shape, factors, strict=True):
            cuts = sorted(data.draw(st.lists(st.integers(0, n), min_size=p - 1, max_size=p - 1)))
            blocks.append(tuple(b - a for a, b in itertools.pairwise([0, *cuts, n])))
        return Decomposition(tuple(blocks))

    source, target = decomposition(), decomposition()
    whole = torch.arange(1.0, 1 + source.points()).reshape(shape)
    plans = [repartition_plan(source, target, rank) for rank in range(size)]
    for place, made in zip(itertools.product(*map(range, target.grid_shape)), play(source, plans, whole), strict=True):
        assert torch.equal(made, whole[target.slices(place)])
    assert all(plan.filled for plan in plans)
    if source == target:
        assert not any(plan.sends or plan.receives for plan in plans)


LINE = Decomposition.even((6,), (2,))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: halo_plan(LINE, 0, [[(0, 9), (3, 6)]], ["mirror"]), "padding='mirror' must be one of zeros, circular"),
        (lambda: halo_plan(LINE, 0, [[(0, 3), (5, 4)]], ["zeros"]), "from 5 to 4 of axis 0 ends before"),
        (lambda: halo_plan(LINE, 0, [[(-6, 3), (3, 6)]], ["reflect"]), "6 points: too few for .*reflect.* of width 6"),
        (lambda: halo_plan(LINE, 0, [[(0, 3), (3, 12)]], ["reflect"]), "too few for padding='reflect' of width 6"),
        (lambda: halo_plan(Decomposition(((0,),)), 0, [[(0, 1)]], ["replicate"]), "has 0 points: too few"),
        (lambda: halo_plan(LINE, 0, [[(0, 3), (3, 6)]], ["zeros"] * 2), "1 ranges and 2 paddings for the 1 axes"),
        (lambda: halo_plan(LINE, 0, [[(0, 3)]], ["zeros"]), r"not those of a grid of shape \[2\]"),
        (lambda: repartition_plan(LINE, Decomposition.even((7,), (2,)), 0), r"shape \[6\] .* shape \[7\]"),
        (lambda: repartition_plan(LINE, Decomposition.even((6,), (3,)), 0), r"grid of shape \[2\] .* shape \[3\]"),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words):
        make()
