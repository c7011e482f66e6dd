"""The loss on held-out samples, each counted once at every data-parallel size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from commengine import Communicator, ProcessGrid, UsageError
from tplayers import StageInput
from trainers.pipeline.schedule import Schedule, activations_like
from trainers.training.holders import replicas_of
from trainers.training.interfaces import FiniteBatchSource, Objective


class HeldOut(NamedTuple):
    """The held-out samples of one source.

    name: of the source. weight: of its mean in the mean of all sources, as a probability. batches: its samples.
    iterations: the global batches that an evaluation reads.
    """

    name: str
    weight: float
    batches: FiniteBatchSource[Any]
    iterations: int


class Mean(NamedTuple):
    """A mean loss, and the number of items (for GPT: tokens) that it is the mean of."""

    loss: float
    items: int


class Evaluation(NamedTuple):
    """The result of an evaluation: the mean of each term over all sources, and over each of them by name."""

    means: dict[str, Mean]
    by_source: dict[str, dict[str, Mean]]


def total(means: Mapping[str, Mean]) -> float:
    """The loss: the sum of the terms that have items; NaN if none has."""
    losses = [mean.loss for mean in means.values() if mean.items]
    return sum(losses) if losses else math.nan


def evaluate_sources(
    model: nn.Module, objective: Objective[Any], sources: Sequence[HeldOut], grid: ProcessGrid,
    between: Callable[[], object] = lambda: None, schedule: Schedule | None = None,
) -> Evaluation:  # fmt: skip
    """The objective's terms, by name, over at least one source. Collective, with errors and ``between`` as `evaluate`.

    A source counts by its weight, however many items it has; one without any item of a term does not count there.
    """
    found = {
        source.name: evaluate(
            model, objective, source.batches, grid, iterations=source.iterations, between=between, schedule=schedule
        )
        for source in sources
    }
    means = {}
    for term in objective.names:
        terms = [(source.weight, found[source.name][term]) for source in sources]
        counted = [(weight, mean) for weight, mean in terms if mean.items]
        weights = sum(weight for weight, _ in counted)
        loss = sum(weight * mean.loss for weight, mean in counted) / weights if counted else math.nan
        means[term] = Mean(loss, sum(mean.items for _, mean in counted))
    return Evaluation(means, found)


def evaluate(
    model: nn.Module, objective: Objective[Any], batches: FiniteBatchSource[Any], grid: ProcessGrid, *,
    iterations: int, between: Callable[[], object] = lambda: None, schedule: Schedule | None = None,
) -> dict[str, Mean]:  # fmt: skip
    """The objective's terms, by name, over the first ``iterations`` global batches, at most all samples.

    between: called before each global batch, on all ranks. It may be collective over the world, and may end the
    evaluation by an exception that it raises on all ranks. schedule: of the pipeline of which ``model`` is a stage;
    None if it is the whole model.

    grid: the data group has the samples. If the model has a context group, each of its ranks has the whole batch, and
    the losses of some positions.

    Collective over the data group, the model's tensor and context group, and the pipeline. Leaves the model in training
    mode. Raises UsageError, on all ranks, where a batch is not usable.
    """
    terms = len(objective.names)
    totals = torch.zeros(2 * terms + 1, dtype=torch.float64)  # sums, counts, microbatches that are not usable
    # Read once, because reading waits for a device.
    sums = torch.zeros(terms, dtype=torch.float64, device=grid.world.device)
    model.eval()
    try:
        with torch.no_grad():
            for k in range(min(iterations, len(batches))):
                between()
                usable = []
                for batch in batches(k):
                    if batch.usable:
                        totals[terms:-1] += torch.tensor(batch.counts, dtype=torch.float64)
                        usable.append(batch)
                    else:
                        totals[-1] += 1
                if _same_passes(model, totals):
                    _add_losses(sums, model, objective, usable, schedule)
    finally:
        model.train()
    totals[:terms] = sums
    if schedule is not None:  # the losses are those of the stage with the output layer, and the counts those of each
        of_stages = totals[:terms].clone()
        schedule.pipeline.all_reduce(of_stages)
        totals[:terms] = of_stages
    replicas_of(model, grid).all_reduce(totals[:terms])
    grid.data.all_reduce(totals[terms:])
    if totals[-1]:
        raise UsageError(batches.unusable)
    means = (totals[:terms] / totals[terms:-1]).tolist()
    counts = [int(count) for count in totals[terms:-1]]
    return {name: Mean(*of_term) for name, *of_term in zip(objective.names, means, counts, strict=True)}


def _same_passes(model: nn.Module, totals: Tensor) -> bool:
    """Whether the ranks of the model's expert group, if it has one, can all make the passes of a global batch.

    They have equally many, in which their tokens meet, unless one cannot use a micro-batch. Collective over the group.
    """
    group: Communicator | None = getattr(model, "expert_group", None)
    if group is None or group.size == 1:
        return True
    unusable = totals[-1:].clone()
    group.all_reduce(unusable)
    return not unusable


def _add_losses(
    sums: Tensor, model: nn.Module, objective: Objective[Any], batches: Sequence[Any], schedule: Schedule | None
) -> None:
    """Add the losses of ``batches`` to ``sums`` [terms], on the stage that has them."""

    def add(model: Any, number: int) -> Tensor:
        losses = objective(model, batches[number].to(sums.device), None)
        for total, of_term in zip(sums, losses, strict=True):
            total += of_term.sum(dtype=torch.float64)
        return sums

    if schedule is None:
        for number in range(len(batches)):
            add(model, number)
        return

    def forward(number: int, at: StageInput | None) -> Tensor:
        return schedule.call(model, at, lambda model: add(model, number))

    schedule.evaluate(len(batches), forward, activations_like(model, batches))
