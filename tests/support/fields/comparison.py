"""Split fields under test: cutting, joining, and layers held against torch's on the whole field."""

import torch
from torch import Tensor

from commengine import CartesianGrid, Decomposition

TOLERANCE = 1e-12


def draw(*shape: int, seed: int = 0) -> Tensor:
    """A float64 tensor that is the same on all ranks."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cut(whole: Tensor, decomposition: Decomposition, grid: CartesianGrid) -> Tensor:
    """This rank's block of ``whole`` [..., *space]."""
    return whole[(..., *decomposition.slices(grid.coords))].clone()


def joined(block: Tensor, decomposition: Decomposition, grid: CartesianGrid) -> Tensor:
    """The whole field of which each rank has a block. It travels by pickle over MPI: no code under test."""
    leading = block.shape[: block.dim() - len(grid.shape)]
    whole = torch.full((*leading, *decomposition.shape), torch.nan, dtype=block.dtype)
    for coords, part in grid.comm.mpi.allgather((grid.coords, block.detach().contiguous().numpy())):
        whole[(..., *decomposition.slices(coords))] = torch.from_numpy(part)
    return whole


def close(found: Tensor, expected: Tensor, what: str = "", tolerance: float = TOLERANCE) -> None:
    """Fail unless the two differ by at most ``tolerance``, relative to the largest value."""
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    if expected.numel():
        worst = float((found - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1))
        assert worst <= tolerance, (what, worst)


def same_bits(tensor: Tensor, grid: CartesianGrid, what: str = "") -> None:
    """Fail unless all ranks have the same bits."""
    for other in grid.comm.mpi.allgather(tensor.detach().contiguous().numpy()):
        assert torch.equal(torch.from_numpy(other), tensor.detach()), what


def equals_torchs(layer, reference, whole: Tensor, grid: CartesianGrid, *, tolerance: float = TOLERANCE) -> None:
    """Hold ``layer`` against ``reference``, torch's layer on the whole field: values, gradients and buffers.

    The reference's state dict must load into the layer.
    """
    layer.load_state_dict(reference.state_dict())
    whole = whole.clone().requires_grad_()
    y = reference(whole)
    gradient = draw(*y.shape, seed=7)
    y.backward(gradient)
    x = cut(whole.detach(), layer.input, grid).requires_grad_()
    out = layer(x)
    assert tuple(y.shape[2:]) == layer.output.shape
    out.backward(cut(gradient, layer.output, grid))
    close(joined(out, layer.output, grid), y, "values", tolerance)
    close(joined(x.grad, layer.input, grid), whole.grad, "gradient of the input", tolerance)
    for (name, ours), theirs in zip(layer.named_parameters(), reference.parameters(), strict=True):
        close(ours.grad, theirs.grad, f"gradient of {name}", tolerance)
        same_bits(ours.grad, grid, name)
    for name, theirs in reference.named_buffers():
        close(layer.get_buffer(name), theirs, name, tolerance)


def second_derivatives_equal_torchs(
    layer, reference, whole: Tensor, grid: CartesianGrid, *, tolerance: float = TOLERANCE
) -> None:
    """Hold the gradients of a penalty on gradients, and a Hessian product, against those of the whole field.

    Both layers have the same parameters. The ranks' penalties are terms of one sum.
    """
    whole, x = whole.clone().requires_grad_(), cut(whole, layer.input, grid).requires_grad_()
    found = []
    for module, leaf, share in ((reference, whole, 1), (layer, x, grid.size)):
        leaves = [leaf, *module.parameters()]
        loss = torch.sin(module(leaf)).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        some = [(g, 1 if number == 0 else share) for number, g in enumerate(first) if g is not None]
        penalty = sum((g.square().sum() / s for g, s in some), torch.zeros((), dtype=whole.dtype))
        way = draw(*whole.shape, seed=11)
        product = first[0] * (way if module is reference else cut(way, layer.input, grid))
        totals = penalty, product.sum()
        found += [torch.autograd.grad(one, leaves, allow_unused=True, retain_graph=True) for one in totals]
    for what, theirs, ours in zip(("penalty", "Hessian product"), found[:2], found[2:], strict=True):
        names = ["the input", *(name for name, _ in layer.named_parameters())]
        for name, of_whole, mine in zip(names, theirs, ours, strict=True):
            of_whole = torch.zeros_like(whole if name == "the input" else mine) if of_whole is None else of_whole
            mine = torch.zeros_like(x if name == "the input" else of_whole) if mine is None else mine
            mine = joined(mine, layer.input, grid) if name == "the input" else mine
            close(mine, of_whole, f"{what} by {name}", tolerance)


def tangents_equal_torchs(
    layer, reference, whole: Tensor, grid: CartesianGrid, *, tolerance: float = TOLERANCE
) -> None:
    """Hold forward mode, and ``torch.func.vjp``, against torch's of the whole field, for what is linear or pools."""
    way = draw(*whole.shape, seed=12)
    y, tangent = torch.func.jvp(reference, (whole,), (way,))
    x, mine = cut(whole, layer.input, grid), cut(way, layer.input, grid)
    close(joined(torch.func.jvp(layer, (x,), (mine,))[1], layer.output, grid), tangent, "jvp", tolerance)
    weights = draw(*y.shape, seed=13)
    (expected,) = torch.func.vjp(reference, whole)[1](weights)
    (found,) = torch.func.vjp(layer, x)[1](cut(weights, layer.output, grid))
    close(joined(found, layer.input, grid), expected, "vjp", tolerance)
