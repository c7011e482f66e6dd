"""Trace training steps: what each rank did, which rank it waited for, and what its caller waited for.

The times of all ranks are put on rank 0's clock. If every rank needs something of every other rank, a collective
cannot end before its last rank has begun. The time that a rank spends in it until then is skew, and the rest is
transfer. All collectives of a step are of this kind. Skew is known as exactly as the clocks are.

On a device (not run yet) spans are those of the host, which enqueues, and waiting is that of the stream that waits.
"""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.step_study.spans import Span, followed
from bench.timing.clocks import Offset, compared
from commengine import CollectiveEvent, Trace, trace
from trainers.training.trainer import Trainer

MODEL_PHASES = ("forward", "recompute", "backward")


@dataclass(frozen=True)
class TracedCollective:
    """One collective of a rank. group, ranks: the communicator's name, and its ranks in the world.

    part, phase: of the step (`spans.Span`). A reduction of gradients belongs to the part "gradients", wherever in
    backward it was enqueued; ``launched`` names that place. waited: from when to when the caller waited for it while
    it ran, or None. skew: seconds until the group's last rank began.
    """

    operation: str
    dtype: str
    bytes: int
    group: str
    ranks: tuple[int, ...]
    stream: str | None
    part: str
    phase: str
    launched: str
    enqueue: float
    start: float
    end: float
    waited: tuple[float, float] | None
    skew: float = 0.0

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end - self.start

    @property
    def exposed(self) -> float:
        """The seconds of that time during which the caller waited."""
        return 0.0 if self.waited is None else self.waited[1] - self.waited[0]

    @property
    def transfer(self) -> float:
        """The seconds without skew."""
        return self.seconds - self.skew


@dataclass(frozen=True)
class TracedStep:
    """One step of one rank. skipped: an fp16 gradient overflowed, so that nothing was updated."""

    start: float
    end: float
    spans: tuple[Span, ...]
    events: tuple[TracedCollective, ...]
    skipped: bool

    @property
    def seconds(self) -> float:
        """The seconds from the first to the last moment, with the optimizer's communication."""
        return self.end - self.start


@dataclass(frozen=True)
class TracedSteps:
    """The traced steps ``steps[rank]``, on rank 0's clock, known within +-uncertainty seconds.

    recordings, bounds: the traces of this rank, one for each step, and when each step began and ended on its clock.
    """

    steps: list[list[TracedStep]]
    uncertainty: float
    recordings: list[Trace]
    bounds: list[tuple[float, float]]


def trace_steps(trainer: Trainer, warmup: int, steps: int, done: Callable[[], object]) -> TracedSteps:
    """Trace ``steps`` steps after ``warmup`` others.

    It calls ``done()`` after each. Collective; rank 0 gets the steps.
    """
    grid = trainer.grid
    for _ in range(warmup):
        trainer.step()
        done()
    trainer.optimizer.wait_for_parameters()
    found, logs = [], []
    began, first = time.perf_counter(), compared(grid.world.mpi)
    groups = {comm.name: tuple(comm.world_ranks()) for comm in (grid.tensor, *grid.tensor.blocks, grid.data)}
    with followed(trainer) as spans:
        for _ in range(steps):
            with trace(grid.tensor, grid.data) as log:
                spans.take()
                start = time.perf_counter()
                step = trainer.step()
                trainer.optimizer.wait_for_parameters()
                if grid.world.device.type != "cpu":  # else the optimizer may still be running
                    torch.cuda.synchronize(grid.world.device)
                end = time.perf_counter()
                of_step = spans.take()
            logs.append(log)
            of_step[-1] = replace(of_step[-1], end=end)
            events = tuple(_event(one, of_step, groups) for one in log.events if one.size > 1)
            found.append(TracedStep(start, end, tuple(of_step), events, step.skipped))
            done()
    ended, last = time.perf_counter(), compared(grid.world.mpi)
    rank = grid.world.rank
    clock = (began, ended, first[rank].seconds, last[rank].seconds)
    everyone = grid.world.mpi.gather([_on_rank_zeros_clock(step, clock) for step in found])
    bounds = [(step.start, step.end) for step in found]
    return TracedSteps(with_skew(everyone or []), _uncertainty(first, last), logs, bounds)


def _uncertainty(first: list[Offset], last: list[Offset]) -> float:
    """The uncertainty of the difference between any two ranks' clocks, in seconds."""
    largest = sorted(max(one.uncertainty, other.uncertainty) for one, other in zip(first, last, strict=True))
    return sum(largest[-2:])


def _event(one: CollectiveEvent, spans: Sequence[Span], groups: dict[str, tuple[int, ...]]) -> TracedCollective:
    at = max(0, bisect.bisect_right(spans, one.enqueue, key=lambda span: span.start) - 1)
    part, phase = spans[at].part, spans[at].phase
    launched = f"{part} {phase}".strip()
    if one.group == "data" and phase in MODEL_PHASES:
        part, phase = "gradients", ""
    waited = None
    if one.stream is None:
        waited = (one.start, one.end)
    elif one.wait_start is not None and one.wait_end is not None:
        low, high = max(one.start, one.wait_start), min(one.end, one.wait_end)
        waited = (low, high) if high > low else None
    return TracedCollective(
        one.operation, one.dtype, one.bytes, one.group, groups[one.group], one.stream, part, phase, launched,
        one.enqueue, one.start, one.end, waited,
    )  # fmt: skip


def _on_rank_zeros_clock(step: TracedStep, clock: tuple[float, float, float, float]) -> TracedStep:
    """Put a step on rank 0's clock.

    clock: two moments of this rank's clock, and the offsets to add at each. Between them the offset changes evenly.
    """
    began, ended, first, last = clock

    def shifted(moment: float) -> float:
        return moment + first + (last - first) * (moment - began) / (ended - began)

    spans = tuple(replace(span, start=shifted(span.start), end=shifted(span.end)) for span in step.spans)
    events = tuple(
        replace(
            one, enqueue=shifted(one.enqueue), start=shifted(one.start), end=shifted(one.end),
            waited=None if one.waited is None else (shifted(one.waited[0]), shifted(one.waited[1])),
        )
        for one in step.events
    )  # fmt: skip
    return replace(step, start=shifted(step.start), end=shifted(step.end), spans=spans, events=events)


def with_skew(ranks: Sequence[Sequence[TracedStep]]) -> list[list[TracedStep]]:
    """``ranks[rank][step]`` with the skew of every collective.

    The n-th collective of a group on one of its streams is the same collective on all ranks of the group.
    """
    found = [list(steps) for steps in ranks]
    for number in range(len(ranks[0]) if ranks else 0):
        begun: dict[Any, list[float]] = defaultdict(list)
        keys = [_keys(steps[number].events) for steps in ranks]
        for steps, mine in zip(ranks, keys, strict=True):
            for key, event in zip(mine, steps[number].events, strict=True):
                begun[key].append(event.start)
        for rank, mine in enumerate(keys):
            step = ranks[rank][number]
            events = tuple(
                replace(event, skew=min(max(0.0, max(begun[key]) - event.start), event.seconds))
                for key, event in zip(mine, step.events, strict=True)
            )
            found[rank][number] = replace(step, events=events)
    return found


def _keys(events: Sequence[TracedCollective]) -> list[tuple[Any, ...]]:
    """Keys of the collectives, equal on all ranks of a collective's group."""
    counts: dict[tuple[Any, ...], int] = defaultdict(int)
    found = []
    for event in events:
        stream = (event.group, event.ranks, (event.stream or "").rpartition("/")[2])
        found.append((*stream, counts[stream]))
        counts[stream] += 1
    return found
