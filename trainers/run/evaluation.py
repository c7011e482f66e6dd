"""The loss on held-out samples, each counted once at every data-parallel size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from commengine import Communicator, UsageError
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
    model: nn.Module, objective: Objective[Any], sources: Sequence[HeldOut], data: Communicator,
    between: Callable[[], object] = lambda: None,
) -> Evaluation:  # fmt: skip
    """The objective's terms, by name, over at least one source. Collective, with errors and ``between`` as `evaluate`.

    A source counts by its weight, however many items it has; one without any item of a term does not count there.
    """
    found = {
        source.name: evaluate(model, objective, source.batches, data, iterations=source.iterations, between=between)
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
    model: nn.Module, objective: Objective[Any], batches: FiniteBatchSource[Any], data: Communicator, *,
    iterations: int, between: Callable[[], object] = lambda: None,
) -> dict[str, Mean]:  # fmt: skip
    """The objective's terms, by name, over the first ``iterations`` global batches, at most all samples.

    between: called before each global batch, on all ranks. It may be collective over the world, and may end the
    evaluation by an exception that it raises on all ranks.

    Collective over ``data`` and the model's tensor group. Leaves the model in training mode. Raises UsageError, on all
    ranks, where a batch is not usable.
    """
    terms = len(objective.names)
    totals = torch.zeros(2 * terms + 1, dtype=torch.float64)  # sums, counts, microbatches that are not usable
    sums = torch.zeros(terms, dtype=torch.float64, device=data.device)  # read once, because reading waits for a device
    model.eval()
    try:
        with torch.no_grad():
            for k in range(min(iterations, len(batches))):
                between()
                for batch in batches(k):
                    if not batch.usable:
                        totals[-1] += 1
                        continue
                    totals[terms:-1] += torch.tensor(batch.counts, dtype=torch.float64)
                    losses = objective(model, batch.to(data.device), None)
                    for total, of_term in zip(sums, losses, strict=True):
                        total += of_term.sum(dtype=torch.float64)
    finally:
        model.train()
    totals[:terms] = sums
    data.all_reduce(totals)
    if totals[-1]:
        raise UsageError(batches.unusable)
    means = (totals[:terms] / totals[terms:-1]).tolist()
    counts = [int(count) for count in totals[terms:-1]]
    return {name: Mean(*of_term) for name, *of_term in zip(objective.names, means, counts, strict=True)}
