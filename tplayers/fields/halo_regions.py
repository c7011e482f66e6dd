"""Which outputs of a convolution the halo reaches, with which points of the kernel. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .geometry import Sliding, Span

Slices = tuple[Any, ...]


def frame(
    rules: Sequence[Sliding],
    outputs: Sequence[Span],
    block: Sequence[Span],
    reads: Sequence[Span],
    native: Sequence[int],
) -> list[tuple[list[Span], list[Span], list[list[Span]]]]:
    """Cut the halo into regions, two for each axis that has one, and return what reads them.

    A region is outside the block along its own axis, inside it along the axes before, and anything along those after.
    So the regions are disjoint, and the outputs that read them may overlap. Each item is (box of outputs, for each axis
    the kernel's points (first, number) that meet the regions, regions).
    """
    found, rest = [], list(reads)
    every = [(0, rule.kernel) for rule in rules]
    for axis, rule in enumerate(rules):
        if native[axis]:
            continue
        start, stop = outputs[axis]
        low, high = interior(rule, outputs[axis], block[axis])
        sides = [(reads[axis][0], block[axis][0]), (block[axis][1], reads[axis][1])]
        regions = [[*rest[:axis], side, *rest[axis + 1 :]] for side in sides]
        if low < high:
            # An output of the first side reads the halo with its first points, one of the last side with its last ones.
            most = -(-(block[axis][0] + rule.before - start * rule.stride) // rule.dilation)
            first = max(0, -(-(block[axis][1] + rule.before - (stop - 1) * rule.stride) // rule.dilation))
            met = [((start, low), (0, min(most, rule.kernel))), ((high, stop), (first, rule.kernel - first))]
            cases = [(*one, [region]) for one, region in zip(met, regions, strict=True)]
        else:
            cases = [((start, stop), every[axis], regions)]
        for ends, taps, read in cases:
            if ends[0] < ends[1]:
                box, points = list(outputs), list(every)
                box[axis], points[axis] = ends, taps
                found.append((box, points, read))
        rest[axis] = block[axis]
    return found


def interior(rule: Sliding, outputs: Span, block: Span) -> Span:
    """Return the span of ``outputs`` that read nothing outside ``block``; empty if there is none."""
    low = max(outputs[0], -(-(block[0] + rule.before) // rule.stride))
    high = min(outputs[1], (block[1] - 1 - rule.reach + rule.before) // rule.stride + 1)
    return (low, high) if low < high else (outputs[0], outputs[0])


def reads_of(rule: Sliding, outputs: Span, taps: Span) -> Span:
    """Return the span of positions that ``taps``, (first, number) of the kernel, meet for ``outputs``."""
    first = -rule.before + taps[0] * rule.dilation
    return outputs[0] * rule.stride + first, (outputs[1] - 1) * rule.stride + first + (taps[1] - 1) * rule.dilation + 1


def common(
    box: Sequence[Span], region: Sequence[Span], piece: Sequence[slice], origin: Sequence[int]
) -> tuple[Slices, Slices] | None:
    """Return where a box, a region of the halo and a piece overlap, as slices of box and piece; None: nowhere.

    origin: the global position at which the pieces' places begin to count.
    """
    at, of = [], []
    for (low, high), ends, part, start in zip(box, region, piece, origin, strict=True):
        first = max(low, ends[0], part.start + start)
        last = min(high, ends[1], part.stop + start)
        if first >= last:
            return None
        at.append(slice(first - low, last - low))
        of.append(slice(first - part.start - start, last - part.start - start))
    return (..., *at), (..., *of)
