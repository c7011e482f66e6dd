"""A sharded module held against the module on the whole field."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tplayers
from commengine import CartesianGrid, Communicator, Decomposition
from tests.support.fields.comparison import close, cut, draw, joined, same_bits

#: the grids of each number of ranks, by the number of axes
GRIDS = {
    1: {1: (1,), 2: (1, 1), 3: (1, 1, 1)},
    2: {1: (2,), 2: (1, 2), 3: (1, 2, 1)},
    4: {1: (4,), 2: (2, 2), 3: (2, 1, 2)},
}


def uneven(comm: Communicator, shape: Sequence[int]) -> tuple[CartesianGrid, Decomposition]:
    """A grid for a field of this shape, and blocks of different sizes."""
    ranks = GRIDS[comm.size][len(shape)]
    blocks = []
    for axis, (points, parts) in enumerate(zip(shape, ranks, strict=True)):
        sizes = list(Decomposition.even((points,), (parts,)).blocks[0])
        if parts > 1:
            sizes[0], sizes[-1] = sizes[0] + 2 - axis, sizes[-1] - 2 + axis
        blocks.append(tuple(sizes))
    return CartesianGrid(comm, ranks), Decomposition(tuple(blocks))


def equals_whole(
    module: nn.Module, comm: Communicator, channels: int, shape: Sequence[int], *, batch: int = 2, **options: Any
) -> tplayers.ShardedModule:
    """Shard ``module`` (float64), and hold it against it: values, gradients, buffers and the state dict."""
    grid, field = uneven(comm, shape)
    reference = copy.deepcopy(module)
    sharded = tplayers.shard(module, grid, field, channels=channels, **options)
    names = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    assert list(names.items()) == [(name, tuple(tensor.shape)) for name, tensor in sharded.state_dict().items()]
    whole = draw(batch, channels, *shape).requires_grad_()
    x = cut(whole.detach(), field, grid).requires_grad_()
    expected, found = reference(1 * whole), sharded(1 * x)  # not leaves, which nothing may change in place
    several = (
        (expected, found, sharded.output) if isinstance(expected, tuple) else ((expected,), (found,), (sharded.output,))
    )
    losses: list[Tensor] = []
    for number, (y, out, blocks) in enumerate(zip(*several, strict=True)):
        gradient = draw(*y.shape, seed=7 + number)
        close(out if blocks is None else joined(out, blocks, grid), y.detach(), "values")
        part = gradient / grid.size if blocks is None else cut(gradient, blocks, grid)
        losses.append((out * part).sum())
        (y * gradient).sum().backward(retain_graph=True)
    sum(losses).backward()
    close(joined(x.grad, field, grid), whole.grad, "gradient of the input")
    for (name, ours), (_, theirs) in zip(sharded.named_parameters(), reference.named_parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
            continue
        close(ours.grad, theirs.grad, f"gradient of {name}")
        same_bits(ours.grad, grid, name)
    for name, theirs in reference.state_dict().items():
        close(sharded.state_dict()[name].double(), theirs.double(), name)
    for name, theirs in module.state_dict().items():
        assert theirs.data_ptr() != sharded.state_dict()[name].data_ptr() or not theirs.numel(), name
    return sharded


def refusal(module: nn.Module, comm: Communicator, channels: int, shape: Sequence[int]) -> str:
    """The error of `tplayers.shard`, which must be the same on every rank, a ValueError."""
    grid, field = uneven(comm, shape)
    try:
        tplayers.shard(module, grid, field, channels=channels)
        text = ""
    except ValueError as error:
        text = str(error)
    assert len(set(comm.mpi.allgather(text))) == 1
    return text


class Of(nn.Module):
    """``function(self, x)`` as a module with these children and parameters."""

    def __init__(self, function: Any, **children: Any) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, nn.Parameter(child) if isinstance(child, Tensor) else child)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def parameter(*shape: int, seed: int = 3) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5
