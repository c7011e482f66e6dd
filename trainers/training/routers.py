"""Routers: the routers of a model with experts in training: their losses of a step, and the tokens of each expert."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from commengine import Communicator
from tplayers import ModelPart, RouterLosses


class Routers:
    """The routers of ``model``, which has `tplayers.RouterLosses` and experts in all layers.

    A step is: a block of `counted`, in it a block of `watched` around each forward pass, and then `means`.
    """

    def __init__(self, model: Any) -> None:
        self.losses: RouterLosses = model.router_losses
        self._part: ModelPart = model.part
        self._found: list[Tensor] = []  # on the device, and read once a step
        self._tokens = torch.zeros(self._part.layers, model.config.num_experts, dtype=torch.int64, device="cpu")

    @classmethod
    def of(cls, model: Any) -> Routers | None:
        """Those of ``model``; None if it has no experts."""
        return None if getattr(model, "router_losses", None) is None else cls(model)

    @contextlib.contextmanager
    def counted(self, scale: float) -> Iterator[None]:
        """A step, in which the losses of a sequence have gradients times ``scale`` (`RouterLosses.scale`)."""
        self._found.clear()
        with self.losses.counted(scale):
            yield

    @contextlib.contextmanager
    def watched(self, chunk: int) -> Iterator[None]:
        """A forward pass through a chunk of this rank's layers."""
        with self.losses.collected() as found:
            yield
        self._found.extend(found.losses)
        for layer, counts in zip(self._part.chunks[chunk], found.tokens, strict=True):
            self._tokens[layer] += torch.tensor(counts, device="cpu")

    def means(self, samples: int, shared: Communicator | None) -> Tensor:
        """This rank's share of the losses' means over ``samples`` sequences, in the order of their names: float64 [2].

        shared: a group of which each rank has a part of each sequence, over which they are summed; or None.
        """
        sums = torch.zeros(len(self.losses.names), dtype=torch.float64, device="cpu")
        if self._found:
            sums = torch.stack(self._found).double().sum(dim=0).cpu()
        if shared is not None:
            shared.all_reduce(sums)
        return sums / samples

    def take_tokens(self, groups: Iterable[Communicator]) -> list[list[int]]:
        """[layer][expert]: the rows of each expert of the whole model since the last call, all over ``groups``.

        groups: those of which each rank has other tokens, or other layers. Collective over them.
        """
        for group in groups:
            group.all_reduce(self._tokens)
        found: list[list[int]] = self._tokens.tolist()
        self._tokens.zero_()
        return found
