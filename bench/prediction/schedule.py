"""The seconds of a pipeline's schedule: 1F1B, or interleaved 1F1B, from the seconds of its chunks and messages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

from tplayers import formulas
from trainers.pipeline.orders import order

_LONG = 8192  # chunks times micro-batches of all ranks, from which on a schedule is extrapolated
_SETTLED = 4  # rounds of p micro-batches after which a further round takes as long as the one before


def schedule_seconds(
    seconds: Mapping[tuple[int, bool, int], float], microbatches: int, messages: Sequence[float]
) -> float:
    """The seconds from the first forward to the last backward.

    seconds, messages: as in `tplayers.formulas.timeline`. A long schedule follows from two shorter ones, because in its
    middle p micro-batches take as long as the p before: exactly, if stages and messages are equal but for the ends.
    """
    stages, chunks = len(messages), len(seconds) // (2 * len(messages))
    few = microbatches % stages + _SETTLED * stages
    if (
        stages * microbatches * chunks <= _LONG
        or microbatches <= few + stages
        or (chunks > 1 and microbatches % stages)
    ):
        return _simulated(seconds, microbatches, messages)
    short, longer = (_simulated(seconds, count, messages) for count in (few, few + stages))
    return short + (microbatches - few) // stages * (longer - short)


def _simulated(seconds: Mapping[tuple[int, bool, int], float], microbatches: int, messages: Sequence[float]) -> float:
    """The end of `tplayers.formulas.timeline`, for a plan, which asks for few schedules with many times."""
    stages = len(messages)
    steps = _steps(stages, microbatches, len(seconds) // (2 * stages))
    links, clocks, ends = [*messages, 0.0], [0.0] * stages, [0.0] * (len(steps) + 1)
    for place, (rank, chunk, link, source) in enumerate(steps):
        clocks[rank] = ends[place] = max(clocks[rank], ends[source] + links[link]) + seconds[chunk]
    return max(clocks)


@functools.lru_cache(maxsize=64)
def _steps(stages: int, microbatches: int, chunks: int) -> list[tuple[int, tuple[int, bool, int], int, int]]:
    """All actions, each after the one that it needs: rank, chunk, link of the message, place of the one it needs."""
    orders = [order(stage, stages, microbatches, chunks) for stage in range(stages)]
    alike = dict.fromkeys(itertools.product(range(stages), (False, True), range(chunks)), 1.0)
    spans = formulas.timeline(orders, alike).spans
    actions = sorted((begin, rank, action) for rank, span in enumerate(spans) for action, (begin, _) in span.items())
    places: dict[tuple[int, formulas.Action] | None, int] = {
        (rank, one): at for at, (_, rank, one) in enumerate(actions)
    }
    found = []
    for _, rank, (backward, microbatch, chunk) in actions:
        source = formulas.needed((backward, microbatch, chunk), rank, stages, chunks)
        link = stages if source is None or source[0] == rank else rank if backward else source[0]
        found.append((rank, (rank, backward, chunk), link, places.get(source, -1)))  # -1: there from the beginning
    return found
