"""What is to be tested: an operator that communicates, and its serial definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

#: how many rows the ranks' inputs may have: as many on every rank; the same, and a multiple of the number of ranks; the
#: same, and any number, of which each rank gets a part; each rank its own number
Rows = Literal["equal", "multiple", "parts", "own"]
DTYPE = torch.float64
#: the first number of the seeds of inputs, and of the weights of outputs
OF_INPUTS, OF_OUTPUTS, OF_GRADIENTS = 0, 1000, 2000


@dataclass(frozen=True)
class Operator:
    """An operator on several ranks.

    function: called by every rank with its own tensor, float64 of shape [rows, columns]; returns one tensor, of any
    shape. serial: called in one process with the tensors of all ranks, in rank order; returns the outputs of all ranks.
    It uses torch's operations only, so its derivative is the truth. An output that a rank does not have is a tensor
    without elements.

    rows: how many rows the ranks' inputs may have (`Rows`). linear: whether the dot-product test applies. root: the
    only rank that has an input; ``function`` gets None on the others in the check "no input", else a tensor [0,
    columns]. shared_input: all ranks hold one input, and each one's gradient is the whole gradient of it.
    shared_output: all ranks hold one output, which counts once in the loss. together: the inputs of all ranks require a
    gradient, or none does: the check "no grad" is left out. Without these, what is differentiated is
    the sum of the ranks' losses, each of the rank's own output.
    """

    name: str
    function: Callable[..., Tensor]
    serial: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    rows: Rows = "equal"
    linear: bool = True
    root: int | None = None
    shared_input: bool = False
    shared_output: bool = False
    together: bool = False

    def inputs(self, rows: Sequence[int], columns: int) -> list[Tensor]:
        """Random inputs of all ranks; ``rows`` by rank."""
        if self.root is not None:
            rows = [count if rank == self.root else 0 for rank, count in enumerate(rows)]
        return [draw((n, columns), OF_INPUTS + rank * (not self.shared_input)) for rank, n in enumerate(rows)]

    def weights(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Random cotangents of all ranks' outputs. Those of different ranks differ, unless they hold one output."""
        return [draw(y.shape, OF_OUTPUTS + rank * (not self.shared_output)) for rank, y in enumerate(outputs)]


def draw(shape: Sequence[int], seed: int) -> Tensor:
    """Random numbers, the same on every rank."""
    return torch.randn(tuple(shape), dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Truth:
    """What the serial definition says: the outputs of all ranks, and gradients by their inputs."""

    outputs: list[Tensor]
    gradients: list[Tensor]

    @staticmethod
    def of(operator: Operator, inputs: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> Truth:
        """The gradients of the sum of all outputs times ``weights``, by default those of `Operator.weights`."""
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = list(operator.serial(leaves))
        weights = operator.weights(outputs) if weights is None else weights
        gradients = gradients_of(operator, loss_of(operator, outputs, weights), leaves)
        return Truth([y.detach() for y in outputs], gradients)

    @staticmethod
    def twice(operator: Operator, inputs: Sequence[Tensor]) -> Truth:
        """The outputs, and the gradients of `penalty` on the gradients of a loss that is not linear."""
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = list(operator.serial(leaves))
        loss = loss_of(operator, [torch.sin(y) for y in outputs], operator.weights(outputs))
        gradients = gradients_of(operator, loss, leaves, create_graph=True)
        terms = [penalty(operator, g, rank) for rank, g in enumerate(gradients)]
        total = terms[0] if operator.shared_input else torch.stack(terms).sum()
        return Truth([y.detach() for y in outputs], gradients_of(operator, total, leaves))


def penalty(operator: Operator, gradient: Tensor, rank: int) -> Tensor:
    """A number of a rank's gradient, whose derivative depends on the gradient."""
    weight = draw(gradient.shape, OF_GRADIENTS + rank * (not operator.shared_input))
    return (weight * gradient**3).sum()


def loss_of(operator: Operator, outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum of the outputs times the weights. An output that all ranks hold counts once."""
    terms = [(y * w).sum() for y, w in zip(outputs, weights, strict=True)]
    return terms[0] if operator.shared_output else torch.stack(terms).sum()


def gradients_of(
    operator: Operator, loss: Tensor, leaves: Sequence[Tensor], *, create_graph: bool = False
) -> list[Tensor]:
    """The gradients by the ranks' inputs; by an input that all ranks hold each rank has the whole."""
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = list(torch.autograd.grad(loss, leaves, create_graph=create_graph, materialize_grads=True))
    return [torch.stack(found).sum(0)] * len(found) if operator.shared_input else found
