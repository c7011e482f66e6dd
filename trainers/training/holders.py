"""Which ranks hold a parameter: over which its losses and gradients are summed, and which of them writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from commengine import Communicator, ProcessGrid
from tplayers.experts.moe import expert_parameters

Value = TypeVar("Value")


def replicas_of(model: nn.Module, grid: ProcessGrid) -> Communicator:
    """The ranks over which the losses and gradients of ``model`` are summed: with its context group, or the data group.

    Canonical layers have summed them over the context group, and without such a group the two are the same.
    """
    return grid.replicas if getattr(model, "partial_losses", False) else grid.data


def first_copies(model: nn.Module, named: Mapping[str, Value]) -> dict[str, Value]:
    """Those of ``named``, by names of parameters, but the one of which another pipeline stage has the first copy."""
    second = getattr(model, "second_copy", None)
    return {name: value for name, value in named.items() if name != second}


def held_first(model: nn.Module, grid: ProcessGrid, named: Mapping[str, Value]) -> dict[str, Value]:
    """Those of ``named``, by names of parameters, that this rank holds as the first of all replicas and stages.

    A tensor group holds a parameter together, so it is the first for all of its ranks, or for none. Over all other
    ranks there is one such group for each name. Without expert groups they are in the first replica.
    """
    experts = expert_parameters(model)

    def first(name: str) -> bool:
        return (grid.expert_replicas if name in experts else grid.replicas).rank == 0

    return {name: value for name, value in first_copies(model, named).items() if first(name)}
