"""Split fields under test: cutting, joining, and layers held against torch's on the whole field."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from commengine import CartesianGrid, Decomposition

TOLERANCE = 1e-12
#: grids of 1, 2 and 3 axes, for each number of ranks
SHAPES = {1: [(1,), (1, 1), (1, 1, 1)], 2: [(2,), (1, 2), (1, 2, 1)], 4: [(4,), (2, 2), (2, 1, 2)]}


def draw(*shape: int, seed: int = 0) -> Tensor:
    """A float64 tensor that is the same on all ranks."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def numbers(seed: int) -> Callable[[int, int], int]:
    """Draws whole numbers from the first to the second argument, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return lambda low, high: int(torch.randint(low, high + 1, (), generator=generator))


def drawn_blocks(number: Callable[[int, int], int], shape: Sequence[int], low: int, high: int) -> Decomposition:
    """Blocks of ``low`` to ``high`` points for a grid of ``shape``."""
    return Decomposition(tuple(tuple(number(low, high) for _ in range(ranks)) for ranks in shape))


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
