"""Second derivatives and tangents of layers on split fields, held against those of torch's layer on the whole field."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from commengine import CartesianGrid

from .comparison import close, cut, draw, joined, same_bits


def equals_torchs_twice(layer: nn.Module, reference: nn.Module, whole: Tensor, grid: CartesianGrid) -> None:
    """Hold the gradient of a penalty on gradients, and a Hessian-vector product, against the reference's.

    Both are taken by the input and by the parameters. The reference's state dict must load into the layer. Once all
    ranks' losses are not linear in the result, and once one rank's is, of which the gradient has no graph of its own.
    """
    layer.load_state_dict(reference.state_dict())
    with torch.no_grad():
        shape = reference(whole).shape
    weights, way = draw(*shape, seed=21), draw(*whole.shape, seed=22)
    mine = partial(cut, decomposition=layer.input, grid=grid)
    for linear in (None, whole.numel() % grid.size):
        straight = torch.zeros(shape, dtype=torch.bool)
        if linear is not None:
            coords = grid.comm.mpi.bcast(grid.coords, root=linear)
            straight[(..., *layer.output.slices(coords))] = True
        theirs = _second(reference, whole.clone(), weights, way, partial(_mixed, straight), 1)
        loss = torch.clone if linear == grid.rank else torch.sin
        ours = _second(layer, mine(whole), cut(weights, layer.output, grid), mine(way), loss, grid.size)
        for kind, found, expected in zip(("penalty", "Hessian product"), ours, theirs, strict=True):
            kind = f"{kind}, linear on rank {linear}"
            close(joined(found[0], layer.input, grid), expected[0], f"{kind}: input")
            for (name, _), one, of_whole in zip(layer.named_parameters(), found[1:], expected[1:], strict=True):
                close(one, of_whole, f"{kind}: {name}")
                same_bits(one, grid, name)


def _mixed(straight: Tensor, y: Tensor) -> Tensor:
    return torch.where(straight, y, torch.sin(y))


def _second(
    layer: Callable[[Tensor], Tensor],
    x: Tensor,
    weights: Tensor,
    way: Tensor,
    loss: Callable[[Tensor], Tensor],
    ranks: int,
) -> list[Sequence[Tensor]]:
    """By input and parameters: the gradients of a penalty on all gradients, and the Hessian times ``way``.

    ranks: all of them have the gradients by the parameters, so each takes its share of them.
    """
    assert isinstance(layer, nn.Module)
    leaves = [x.requires_grad_(), *layer.parameters()]

    def first() -> Sequence[Tensor]:
        return torch.autograd.grad((loss(layer(x)) * weights).sum(), leaves, create_graph=True)

    def by_leaves(y: Tensor) -> Sequence[Tensor]:
        if not y.requires_grad:
            return [torch.zeros_like(one) for one in leaves]
        return torch.autograd.grad(y, leaves, allow_unused=True, materialize_grads=True)

    of_x, *of_parameters = first()
    penalty = of_x.pow(3).sum() + sum(g.square().sum() for g in of_parameters) / ranks
    return [by_leaves(penalty), by_leaves((first()[0] * way).sum())]


def tangents_equal_torchs(layer, reference, whole: Tensor, grid: CartesianGrid) -> None:
    """Hold forward mode, and ``torch.func.vjp``, against torch's of the whole field, for what is linear or pools."""
    way = draw(*whole.shape, seed=12)
    y, tangent = torch.func.jvp(reference, (whole,), (way,))
    x, mine = cut(whole, layer.input, grid), cut(way, layer.input, grid)
    close(joined(torch.func.jvp(layer, (x,), (mine,))[1], layer.output, grid), tangent, "jvp")
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, mine))).tangent
    close(joined(found, layer.output, grid), tangent, "dual numbers")
    weights = draw(*y.shape, seed=13)
    (expected,) = torch.func.vjp(reference, whole)[1](weights)
    (found,) = torch.func.vjp(layer, x)[1](cut(weights, layer.output, grid))
    close(joined(found, layer.input, grid), expected, "vjp")
