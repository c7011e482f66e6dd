"""Traced training steps: what each rank did, whom it waited for, and what its caller waited for.

Times of all ranks are put on rank 0's clock. A collective in which every rank needs something of every other cannot end
before its last rank has begun: what a rank spent in it until then is skew, the rest transfer. All collectives of a step
are of that kind. Skew is known as well as the clocks are.

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

    part, phase: of the step (`spans.Span`); a reduction of gradients is of the part "gradients" wherever in backward it
    was enqueued, which ``launched`` says. waited: from when to when the caller waited for it while it ran, or None.
    skew: seconds until the group's last rank began.
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
        """Seconds of that for which the caller waited."""
        return 0.0 if self.waited is None else self.waited[1] - self.waited[0]

    @property
    def transfer(self) -> float:
        """Seconds without skew."""
        return self.seconds - self.skew


@dataclass(frozen=True)
class TracedStep:
    """One step of one rank. skipped: an overflow in fp16, so that nothing was updated."""

    start: float
    end: float
    spans: tuple[Span, ...]
    events: tuple[TracedCollective, ...]
    skipped: bool

    @property
    def seconds(self) -> float:
        """From the first to the last moment, the optimizer's communication included."""
        return self.end - self.start


@dataclass(frozen=True)
class TracedSteps:
    """``steps[rank]``, on rank 0's clock, known within +-uncertainty seconds; this rank's recordings, one a step."""

    steps: list[list[TracedStep]]
    uncertainty: float
    recordings: list[Trace]


def trace_steps(trainer: Trainer, warmup: int, steps: int, done: Callable[[], object]) -> TracedSteps:
    """Trace ``steps`` steps after ``warmup`` others; ``done()`` after each. Collective; rank 0 gets all the steps."""
    grid = trainer.grid
    for _ in range(warmup):
        trainer.step()
        done()
    trainer.optimizer.wait_for_parameters()
    found, logs = [], []
    began, first = time.perf_counter(), compared(grid.world.mpi)
    groups = {comm.name: tuple(comm.world_ranks()) for comm in (grid.tensor, grid.data)}
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
    return TracedSteps(with_skew(everyone or []), _uncertainty(first, last), logs)


def _uncertainty(first: list[Offset], last: list[Offset]) -> float:
    """Of the difference between any two ranks' clocks, in seconds."""
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
    """clock: two moments of this rank's, and what must be added to it then; between them it drifts evenly."""
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
    """``ranks[rank][step]`` with every event's skew.

    The n-th event of a group on one of its streams is the same collective on all its ranks.
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
    """Names of collectives that are the same on all ranks of their group."""
    counts: dict[tuple[Any, ...], int] = defaultdict(int)
    found = []
    for event in events:
        lane = (event.group, event.ranks, (event.stream or "").rpartition("/")[2])
        found.append((*lane, counts[lane]))
        counts[lane] += 1
    return found
