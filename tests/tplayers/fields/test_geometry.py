"""The geometry of layers on split fields, against the same said position by position."""

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tplayers.fields.geometry import Adaptive, Scaled, Sliding, Transposed, output_bounds, read_spans

SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=5)
SLIDING = st.builds(
    Sliding, st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.integers(0, 4)
)
ADAPTIVE = st.builds(Adaptive, st.integers(1, 9), st.just(0))
TRANSPOSED = st.builds(
    Transposed, st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.integers(0, 2)
)
SCALED = st.builds(Scaled, st.integers(1, 5), st.integers(0, 2), st.booleans())


def owner(sizes, place):
    """The rank of the input next to ``place``; of two as near, the first."""
    points = sum(sizes)
    nearest = min(range(points), key=lambda i: (abs(i - place), i))
    return next(rank for rank, end in enumerate(itertools.accumulate(sizes)) if nearest < end)


def centre(rule, output):
    if isinstance(rule, Sliding):
        return Fraction(output * rule.stride - rule.before) + Fraction(rule.reach, 2)
    if isinstance(rule, Transposed):
        return (output + rule.padding - Fraction(rule.reach, 2)) / rule.stride
    if isinstance(rule, Adaptive):
        return (output + Fraction(1, 2)) * rule.points / rule.size - Fraction(1, 2)
    if rule.corners > 1:
        return Fraction(output * (rule.corners - 1), rule.corners * rule.scale - 1)
    return (output + Fraction(1, 2)) / rule.scale - Fraction(1, 2)


def of_points(rule, points):
    """The drawn rule, where it depends on the number of inputs."""
    if isinstance(rule, Adaptive):
        return replace(rule, points=points)
    return replace(rule, corners=points) if isinstance(rule, Scaled) and rule.corners else rule


@settings(deadline=None)
@given(st.one_of(SLIDING, TRANSPOSED, ADAPTIVE, SCALED), SIZES)
def test_an_output_belongs_to_the_rank_of_its_centre(rule, sizes):
    rule = of_points(rule, sum(sizes))
    outputs = rule.outputs(sum(sizes))
    assume(outputs > 0)
    bounds = output_bounds(rule, sizes)
    assert (bounds[0], bounds[-1]) == (0, outputs)
    owners = [rank for rank, (low, high) in enumerate(itertools.pairwise(bounds)) for _ in range(low, high)]
    assert owners == [owner(sizes, centre(rule, output)) for output in range(outputs)]


@pytest.mark.slow
@settings(deadline=None)
@given(SLIDING, st.integers(1, 12), st.data())
def test_a_sliding_rule_reads_as_torchs_convolution(rule, points, data):
    assume(points + rule.before + rule.after > rule.reach)
    padded = F.pad(torch.arange(points, dtype=torch.float64) + 1, (rule.before, rule.after))
    reads = padded.unfold(0, rule.reach + 1, rule.stride)
    assert len(reads) == rule.outputs(points)
    start = data.draw(st.integers(0, len(reads) - 1))
    stop = data.draw(st.integers(start + 1, len(reads)))
    low, high = rule.reads(start, stop)
    assert torch.equal(padded[low + rule.before : low + rule.before + rule.reach + 1], reads[start])
    assert torch.equal(padded[high + rule.before - rule.reach - 1 : high + rule.before], reads[stop - 1])


@settings(deadline=None)
@given(TRANSPOSED, st.integers(1, 8), st.data())
def test_a_transposed_rule_reads_all_inputs_of_its_outputs_and_says_where_they_are(rule, points, data):
    assume(rule.output_padding < max(rule.stride, rule.dilation))
    outputs = rule.outputs(points)
    assume(outputs > 0)
    start = data.draw(st.integers(0, outputs - 1))
    stop = data.draw(st.integers(start + 1, outputs))
    low, high = rule.reads(start, stop)
    taps = [(i, i * rule.stride - rule.padding + t * rule.dilation) for i in range(points) for t in range(rule.kernel)]
    needed = {i for i, output in taps if start <= output < stop}
    assert needed <= set(range(low, high))
    inside = set(range(max(low, 0), min(high, points)))
    if rule.dilation == 1:  # one more only where the first output has no input
        assert len(inside - needed) <= (rule.stride > rule.kernel)
    skip, missing = rule.crop(start, stop)
    assert 0 <= missing < rule.stride
    assert skip >= 0
    local = (high - low - 1) * rule.stride + rule.reach + 1  # outputs of the inputs that were read
    assert skip + (stop - start) <= local + missing
    assert low * rule.stride - rule.padding + skip == start


@settings(deadline=None)
@given(SCALED, st.integers(1, 8), st.data())
def test_a_scaled_rule_reads_the_inputs_next_to_its_centres(rule, points, data):
    rule = of_points(rule, points)
    outputs = rule.outputs(points)
    start = data.draw(st.integers(0, outputs - 1))
    stop = data.draw(st.integers(start + 1, outputs))
    needed = []
    for output in range(start, stop):
        below = centre(rule, output).__floor__()
        needed += range(below - rule.around + 1, below + rule.around + 1) if rule.around else [output // rule.scale]
    assert rule.reads(start, stop) == (min(needed), max(needed) + 1)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
def test_with_ceil_there_are_as_many_outputs_as_of_torch(points, kernel, stride, dilation, padding):
    assume(2 * padding <= kernel)
    rule = Sliding(kernel, stride, dilation, padding, padding, ceil=True)
    assume(rule.outputs(points) > 0)
    pooled = F.max_pool1d(torch.zeros(1, 1, points), kernel, stride, padding, dilation, ceil_mode=True)
    assert pooled.shape[-1] == rule.outputs(points)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 12))
def test_an_adaptive_rule_reads_as_torchs_pooling(size, points):
    values = torch.arange(points, dtype=torch.float64)[None, None]
    rule = Adaptive(size, points)
    spans = [rule.reads(o, o + 1) for o in range(size)]
    assert [stop - 1 for _, stop in spans] == F.adaptive_max_pool1d(values, size)[0, 0].tolist()
    assert [-start for start, _ in spans] == F.adaptive_max_pool1d(-values, size)[0, 0].tolist()


def test_a_rank_without_outputs_reads_nothing():
    rule = Sliding(kernel=3, stride=4)
    assert output_bounds(rule, [2, 1, 6]) == (0, 1, 1, 2)
    assert read_spans(rule, (0, 1, 1, 2)) == ((0, 3), (0, 0), (4, 7))


def test_a_transposed_convolution_as_wide_as_its_stride_needs_no_halo():
    rule = Transposed(kernel=2, stride=2)
    assert [rule.reads(2 * a, 2 * b) for a, b in ((0, 4), (4, 5), (5, 9))] == [(0, 4), (4, 5), (5, 9)]
    assert rule.crop(8, 10) == (0, 0)
