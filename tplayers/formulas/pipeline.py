"""The costs of a pipeline: where a model is cut into stages, the time of a schedule, and what a stage keeps.

    [P] Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021 (arXiv 2104.04473):
        sections 2.2 (schedules, bubbles) and 4.1 (messages)

p: stages, m: micro-batches, v: chunks of layers that a rank has.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .step import Collective
from .transformer import StageShape, TransformerShape, model_flops

#: (is a backward, micro-batch, chunk): one action of a rank
Action = tuple[bool, int, int]


def bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return the time in which a rank waits, over the time in which it computes: (p - 1) / (v m) [P, section 2.2]."""
    return (stages - 1) / (chunks * microbatches)


def output_layers(shape: TransformerShape, recompute: str = "none") -> float:
    """Return the cost of the output layer and the heads, in layers: the ratio of their FLOPs."""
    one, two = (model_flops(replace(shape, layers=count), 1, recompute) for count in (1, 2))
    return (2 * one - two) / (two - one)


def cut_layers(layers: int, stages: int, last: float = 0.0) -> list[range]:
    """Return the layers of each stage, so that the stage that costs most costs as little as it can.

    last: what the last stage has besides, in layers (`output_layers`). Where stages could exchange a layer, the later
    one has it, because an earlier one keeps more micro-batches. Raises ValueError unless each stage gets a layer.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages: each needs a layer")
    counts = [1] * stages
    for _ in range(layers - stages):
        loads = [count + (last if stage == stages - 1 else 0.0) for stage, count in enumerate(counts)]
        counts[min(reversed(range(stages)), key=loads.__getitem__)] += 1
    starts = [sum(counts[:stage]) for stage in range(stages + 1)]
    return [range(low, high) for low, high in itertools.pairwise(starts)]


def stages(shape: TransformerShape, count: int, chunks: int = 1, recompute: str = "none") -> list[list[StageShape]]:
    """Return the chunks of each of ``count`` ranks: one, cut by cost, or ``chunks`` equal ones.

    Raises ValueError unless each stage gets a layer, and if several chunks cannot be equal.
    """
    if shape.layers % (count * chunks) and chunks > 1:
        raise ValueError(f"{shape.layers} layers are no {chunks} equal chunks on each of {count} stages")
    cut = cut_layers(shape.layers, count * chunks, output_layers(shape, recompute) if chunks == 1 else 0.0)
    found = [StageShape(len(layers), at == 0, layers.stop == shape.layers) for at, layers in enumerate(cut)]
    return [found[rank::count] for rank in range(count)]


def kept_microbatches(stage: int, stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return how many micro-batches' activations a stage keeps at most, each counted for all layers of the rank.

    min(p - i, m) for stage i from 0. With chunks a rank keeps 1 + (p - 1) / (p v) times as many layers' activations on
    stage 0 [P, section 2.2], and more where p does not divide m: the groups of micro-batches that go through the chunks
    are then larger than p.
    """
    if chunks == 1:
        return min(stages - stage, microbatches)
    group = -(-microbatches // max(microbatches // stages, 1))  # which goes through all chunks together
    first = 2 * (stages - stage - 1) + (chunks - 1) * group + 1
    return min(first, chunks * microbatches) / chunks


def stage_messages(
    shape: TransformerShape, batch: int, stage: int, stages: int, microbatches: int, chunks: int = 1, *,
    element_bytes: float = 2, shards: int = 1,
) -> list[Collective]:  # fmt: skip
    """Return the messages of a rank of ``stage`` in a step: v m of b s h elements across a boundary, each way [P].

    Nothing comes into the first chunk of all, and nothing leaves the last one. batch: sequences of a micro-batch.
    shards: the size of the tensor group, if each rank sends its sequence shard.
    """
    size = batch * shape.seq * shape.hidden * element_bytes / shards
    come, leave = (chunks - (stage == end) for end in (0, stages - 1))
    runs = (
        ("recv", come, "forward", "activations"), ("send", leave, "forward", "activations"),
        ("recv", leave, "backward", "gradients"), ("send", come, "backward", "gradients"),
    )  # fmt: skip
    return [
        Collective(operation, size, 2, count * microbatches, f"{what} of a stage [P]", "pipeline", phase)
        for operation, count, phase, what in runs
        if count
    ]


@dataclass(frozen=True)
class Timeline:
    """When each action of each rank begins and ends, in seconds, and the seconds of the whole schedule."""

    spans: Sequence[Mapping[Action, tuple[float, float]]]

    @property
    def seconds(self) -> float:
        """The end of the last action."""
        return max(end for rank in self.spans for _, end in rank.values())

    def idle(self, rank: int) -> float:
        """Return the share of the whole in which ``rank`` computes nothing."""
        return 1 - sum(end - begin for begin, end in self.spans[rank].values()) / self.seconds


def timeline(
    orders: Sequence[Sequence[Action]],
    seconds: Mapping[tuple[int, bool, int], float],
    message: float | Sequence[float] = 0.0,
) -> Timeline:
    """Return when each action happens if every rank does its order, and messages are sent while it goes on.

    orders: of each rank. seconds: of the action of a chunk, by (rank, is a backward, chunk). message: the seconds of
    one from a stage to the next, or of each: from rank i to rank i + 1, and back. The last rank's next is rank 0.

    Raises ValueError, naming the actions, if the orders wait for each other.
    """
    stages, chunks = len(orders), 1 + max(chunk for one in orders for *_, chunk in one)
    messages = [message] * stages if isinstance(message, int | float) else message
    spans: list[dict[Action, tuple[float, float]]] = [{} for _ in orders]
    places, clocks = [0] * stages, [0.0] * stages
    while any(place < len(one) for place, one in zip(places, orders, strict=True)):
        moved = False
        for rank, one in enumerate(orders):
            while places[rank] < len(one):
                action = one[places[rank]]
                ready = _ready(action, rank, chunks, spans, messages)
                if ready is None:
                    break
                begin = max(ready, clocks[rank])
                clocks[rank] = begin + seconds[rank, action[0], action[2]]
                spans[rank][action] = (begin, clocks[rank])
                places[rank] += 1
                moved = True
        if not moved:
            left = [tuple(one[place]) for place, one in zip(places, orders, strict=True) if place < len(one)]
            raise ValueError(f"the orders wait for each other, at {left}")
    return Timeline(spans)


def needed(action: Action, rank: int, stages: int, chunks: int) -> tuple[int, Action] | None:
    """Return the rank and the action whose result an action needs; None for the first forwards."""
    backward, microbatch, chunk = action
    virtual = chunk * stages + rank
    before = virtual + 1 if backward else virtual - 1
    if before < 0:
        return None
    if before == stages * chunks:  # the gradient of the loss
        return rank, (False, microbatch, chunk)
    return before % stages, (backward, microbatch, before // stages)


def _ready(
    action: Action, rank: int, chunks: int, spans: Sequence[Mapping[Action, tuple[float, float]]],
    messages: Sequence[float],
) -> float | None:  # fmt: skip
    """Return when the input of an action is there; None if it has not been computed."""
    source = needed(action, rank, len(spans), chunks)
    if source is None:
        return 0.0
    other, before = source
    span = spans[other].get(before)
    link = rank if action[0] else other  # between a rank and the next
    return None if span is None else span[1] + (messages[link] if other != rank else 0.0)
