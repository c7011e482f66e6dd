"""A training step on ranks that are not there: weak scaling by more replicas, with the costs that were measured here.

Each replica computes what one computes here. The step that was measured is the base, with its skew and all else that no
model tells; the tensor group keeps its size and its node. Added is what the collectives of the data group take longer
there than here, both by the same model. They are those of `commengine.cost`'s formulas. Inside a node they cost what
was measured. Between nodes they are rings of slices over the network; if the job itself spans nodes, the fitted model
is scaled instead, as a ring is. Nothing more is hidden behind the backward than here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from bench.step_study import recorder, volumes
from commengine.cost import FittedModel, Link, Machine, collective
from trainers.settings import derived


@dataclass(frozen=True)
class MeasuredMachine:
    """The machine of a study.

    points: the measured times of its collectives (`model_of_points`). model: fitted to them, for more ranks.
    ranks: of a node. several: whether the job spans nodes. between: the link between nodes, where the study could not
    measure one.
    """

    points: FittedModel
    model: FittedModel
    ranks: int
    several: bool
    between: Link

    def seconds(self, operation: str, size: float, ranks: int, tensor: int = 1) -> float:
        """The seconds of a collective of ``size`` bytes in a data group of ``ranks``, beside tensor groups' others.

        All data groups of a node send at once and share its adapter. Raises ValueError for an operation that was not
        measured.
        """
        members = max(1, self.ranks // tensor)
        if self.several or ranks <= members:
            return self._measured(operation, size, ranks)
        inside = self._measured(operation, size, members)
        link = Machine(self.between, self.between, self.ranks, 1).between_for(min(self.ranks, members * tensor))
        return inside + collective(operation, "ring", size / members, math.ceil(ranks / members)).seconds(link)

    def _measured(self, operation: str, size: float, ranks: int) -> float:
        """The seconds by the measured times, or for a number of ranks that was not measured by the fitted model."""
        there = any(one.ranks == ranks for one in self.points.collectives.get(operation, ()))
        return (self.points if there else self.model).seconds(operation, size, ranks)


@dataclass(frozen=True)
class ProjectedStep:
    """A step on a number of ranks: its seconds, those of them that wait for collectives, and the tokens of a second.

    largest: bytes of the data group's largest collective; 0 without one.
    """

    seconds: float
    waiting: float
    tokens_per_second: float
    largest: float


def step_on(ranks: int, step: dict[str, Any], here: tuple[float, float], machine: MeasuredMachine) -> ProjectedStep:
    """The step of step.json on ``ranks`` ranks. Raises ValueError if tensor groups do not fill them.

    here: the seconds of the step here, and of them those that wait for collectives, with their skew.
    """
    config = recorder.from_json(step)
    tensor, before = config.tensor_model_parallel_size, step["ranks"] // config.tensor_model_parallel_size
    if ranks % tensor:
        raise ValueError(f"{ranks} ranks hold no whole number of tensor groups of {tensor}")
    data = ranks // tensor
    batch = derived.batch_size(config, before) * data // before

    def reduced(replicas: int, batch: int) -> tuple[float, float]:
        """The seconds of the data group's collectives, and the bytes of the largest."""
        more = replace(config, global_batch_size=batch)
        found = volumes.expected(more, replicas * tensor, 0) if replicas > 1 else []
        mine = [one.what for one in found if one.group == "data"]
        spent = sum(one.count * machine.seconds(one.operation, one.size, replicas, tensor) for one in mine)
        return spent, max((one.size for one in mine), default=0.0)

    there, largest = reduced(data, batch)
    seconds, waiting = here
    longer = max(-waiting, there - reduced(before, derived.batch_size(config, before))[0])
    total = seconds + longer
    return ProjectedStep(total, waiting + longer, batch * config.seq_length / total, largest)
