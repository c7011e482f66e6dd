"""A model of collectives that goes through the measured points."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bench.collective_study.kind_of_rows import KindOfRows
from bench.collective_study.measurement import Measurement, comparable
from commengine.cost import FittedModel, Segment

#: the transports of the engine: gradients lie in windows where the ranks of a node have them
OURS = ("engine", "shared")


def model_of_points(rows: Sequence[Measurement]) -> FittedModel:
    """A model that is linear between the measured sizes: of the engine, by its fastest way at each size.

    rows: those count that may be compared, of one dtype, reduction and state (`KindOfRows.of`).
    It tells the times of the ranks and operations that were measured at two sizes or more, and no others.
    """
    ours = [row for row in comparable(rows) if row.transport in OURS]
    kind = KindOfRows.of((row.key, row.iterations) for row in ours)
    times: dict[tuple[str, int], dict[int, float]] = {}
    for row in ours:
        if kind.has(row.key):
            mine = times.setdefault((row.operation, row.ranks), {})
            mine[row.bytes] = min(row.p50, mine.get(row.bytes, row.p50))
    found: dict[str, tuple[Segment, ...]] = {}
    for (operation, ranks), sizes in times.items():
        points = sorted(sizes.items())
        segments: list[Segment] = []
        for (low, first), (high, last) in pairwise(points):
            beta = (last - first) / (high - low)
            segments.append(Segment(ranks, low if segments else 0, first - low * beta, beta))
        if segments:
            found[operation] = (*found.get(operation, ()), *segments)
    return FittedModel(found)
