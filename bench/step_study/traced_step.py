"""Trace training steps: what each rank did, which rank it waited for, and what its caller waited for.

The times of all ranks are put on rank 0's clock. If every rank needs something of every other rank, a collective
cannot end before its last rank has begun. The time that a rank spends in it until then is skew, and the rest is
transfer. All collectives of a step are of this kind. So is a message between two stages of a pipeline: a receive has
skew until its sender begins. Skew is known as exactly as the clocks are.

On a device (not run yet) spans are those of the host, which enqueues, and waiting is that of the stream that waits.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.step_study.spans import PIPELINE, Span, followed
from bench.timing.clocks import Offset, compared
from commengine import CollectiveEvent, Communicator, Trace, trace
from commengine.operations import OPERATIONS
from trainers.training.trainer import Trainer

MODEL_PHASES = ("forward", "recompute", "backward")


@dataclass(frozen=True)
class TracedCollective:
    """One collective of a rank. group, ranks: the communicator's name, and its ranks in the world.

    part, phase: of the step (`spans.Span`). A reduction of gradients belongs to the part "gradients", wherever in
    backward it was enqueued; ``launched`` names that place. A message belongs to the part "pipeline", with activations
    to "forward" and with gradients to "backward". waited: from when to when the caller waited for it while it ran, or
    None. skew: seconds until the group's last rank began. peer: of a message, the other rank in the world.
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
    peer: int | None = None

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end - self.start

    @property
    def exposed(self) -> float:
        """The seconds of that time during which the caller waited."""
        return 0.0 if self.waited is None else self.waited[1] - self.waited[0]


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
    done_steps: list[tuple[float, float, list[Span], Trace, bool]] = []
    began, first = time.perf_counter(), compared(grid.world.mpi)
    comms = groups_of(trainer)
    groups = {comm.name: tuple(comm.world_ranks()) for comm in (*comms, *grid.tensor.blocks)}
    messages = trainer.schedule.messages
    backward = {stream.name for stream in (() if messages is None else messages.gradient_streams)}
    with followed(trainer) as spans:
        for _ in range(steps):
            with trace(*comms) as log:
                spans.take()
                start = time.perf_counter()
                step = trainer.step()
                trainer.optimizer.wait_for_parameters()
                if grid.world.device.type != "cpu":  # else the optimizer may still be running
                    torch.cuda.synchronize(grid.world.device)
                end = time.perf_counter()
                of_step = spans.take()
            of_step[-1] = replace(of_step[-1], end=end)
            done_steps.append((start, end, of_step, log, step.skipped))
            done()
    ended, last = time.perf_counter(), compared(grid.world.mpi)
    own = [offsets[grid.world.rank].seconds for offsets in (first, last)]

    def on_rank_zeros(moment: float) -> float:
        """The moment on rank 0's clock. Between the comparisons of the clocks the offset changes evenly."""
        return moment + own[0] + (own[1] - own[0]) * (moment - began) / (ended - began)

    found = [
        TracedStep(
            on_rank_zeros(start), on_rank_zeros(end),
            tuple(replace(one, start=on_rank_zeros(one.start), end=on_rank_zeros(one.end)) for one in of_step),
            tuple(_event(one, of_step, groups, backward, on_rank_zeros) for one in log.events if one.size > 1), skipped,
        )
        for start, end, of_step, log, skipped in done_steps
    ]  # fmt: skip
    everyone = grid.world.mpi.gather(found) or []
    bounds = [(start, end) for start, end, *_ in done_steps]
    return TracedSteps(with_skew(everyone), _uncertainty(first, last), [log for *_, log, _ in done_steps], bounds)


def groups_of(trainer: Trainer) -> list[Communicator]:
    """The groups whose collectives are a step's."""
    grid, tied = trainer.grid, trainer.tied
    found = grid.groups if grid.pipeline.size > 1 else grid.groups[:-1]
    return found + ([] if tied is None or tied.ends is None else [tied.ends])


def _uncertainty(first: list[Offset], last: list[Offset]) -> float:
    """The uncertainty of the difference between any two ranks' clocks, in seconds."""
    largest = sorted(max(one.uncertainty, other.uncertainty) for one, other in zip(first, last, strict=True))
    return sum(largest[-2:])


def _event(
    one: CollectiveEvent, spans: Sequence[Span], groups: dict[str, tuple[int, ...]], backward: Collection[str] = (),
    at: Callable[[float], float] = lambda moment: moment,
) -> TracedCollective:  # fmt: skip
    """The event of a step with these spans.

    backward: streams that carry gradients between stages. at: puts a moment on the clock of all ranks.
    """
    span = spans[max(0, bisect.bisect_right(spans, one.enqueue, key=lambda span: span.start) - 1)]
    in_backward = one.group in ("data", "replicas") and span.phase in MODEL_PHASES
    part, phase = ("gradients", "") if in_backward else (span.part, span.phase)
    peer = None
    if one.group == PIPELINE and OPERATIONS[one.operation].pairwise and one.root is not None:
        part, phase = PIPELINE, "backward" if one.stream in backward else "forward"
        peer = groups[one.group][one.root]
    waited = None
    if one.stream is None:
        waited = (one.start, one.end)
    elif one.wait_start is not None and one.wait_end is not None:
        low, high = max(one.start, one.wait_start), min(one.end, one.wait_end)
        waited = (low, high) if high > low else None
    return TracedCollective(
        one.operation, one.dtype, one.bytes, one.group, groups[one.group], one.stream, part, phase,
        f"{span.part} {span.phase}".strip(), at(one.enqueue), at(one.start), at(one.end),
        None if waited is None else (at(waited[0]), at(waited[1])), peer=peer,
    )  # fmt: skip


def with_skew(ranks: Sequence[Sequence[TracedStep]]) -> list[list[TracedStep]]:
    """``ranks[rank][step]`` with the skew of every collective.

    The n-th collective of a group on one of its streams is the same collective on all ranks of the group, and the n-th
    message that a stream has for a pair of ranks is the same message on both. It ends when one of them knows that it is
    over: a sender may ask late.
    """
    last: dict[Any, float] = {}  # by step and collective: when its last rank began
    over: dict[Any, float] = {}  # by step and message: when the first rank knew it
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            for key, event in _numbered(rank, step):
                last[number, key] = max(event.start, last.get((number, key), event.start))
                if event.peer is not None:
                    over[number, key] = min(event.end, over.get((number, key), event.end))

    def seen(event: TracedCollective, key: Any) -> TracedCollective:
        event = _ended(event, over.get(key, event.end))
        return replace(event, skew=min(last[key] - event.start, event.seconds))

    return [
        [
            replace(step, events=tuple(seen(event, (number, key)) for key, event in _numbered(rank, step)))
            for number, step in enumerate(steps)
        ]
        for rank, steps in enumerate(ranks)
    ]


def _ended(event: TracedCollective, end: float) -> TracedCollective:
    """The event, with an earlier end."""
    waited = event.waited
    if waited is not None:
        waited = (waited[0], min(waited[1], end)) if waited[0] < end else None
    return replace(event, end=max(end, event.start), waited=waited)


def _numbered(rank: int, step: TracedStep) -> Iterator[tuple[Any, TracedCollective]]:
    """Yield each event of ``rank`` after its stream and its number there, which are the same on all its ranks."""
    counts: Counter[Any] = Counter()
    for event in step.events:
        way = None if event.peer is None else (rank, event.peer)[:: 1 if event.operation == "send" else -1]
        stream = (event.group, event.ranks, (event.stream or "").rpartition("/")[2], way)
        yield (stream, counts[stream]), event
        counts[stream] += 1
