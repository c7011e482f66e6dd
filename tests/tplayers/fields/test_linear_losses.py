"""Second and third derivatives of layers of fields where the loss of one rank is linear in the result."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import tplayers
from commengine import CartesianGrid, Communicator, Decomposition
from tests.support.fields.comparison import close, cut, draw, joined

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2), pytest.mark.slow]

F64 = torch.float64
POINTS = (9, 5)


class Formula(nn.Module):
    """A normalisation by its formula: torch's third derivatives of its own norms leave terms out."""

    def __init__(self, groups: int | None, dims: tuple[int, ...], shape: Sequence[int] | None) -> None:
        super().__init__()
        self.groups, self.dims = groups, dims
        for name in ("weight", "bias") if shape else ():
            self.register_parameter(name, nn.Parameter(torch.empty(*shape, dtype=F64)))

    def forward(self, x: Tensor) -> Tensor:
        values = x if self.groups is None else x.reshape(x.shape[0], self.groups, -1)
        deviation = values - values.mean(self.dims, keepdim=True)
        y = (deviation * (deviation.square().mean(self.dims, keepdim=True) + 1e-5).rsqrt()).view(x.shape)
        return y * self.weight + self.bias if dict(self.named_parameters()) else y


Pair = Callable[[CartesianGrid, Decomposition], tuple[nn.Module, nn.Module]]
EACH = (4, 1, 1)
LAYERS: dict[str, Pair] = {
    "a convolution, apart": lambda grid, field: (
        tplayers.FieldConv(4, 4, 3, grid, field, padding=1, dtype=F64), nn.Conv2d(4, 4, 3, padding=1, dtype=F64)
    ),
    "a convolution with strides": lambda grid, field: (
        tplayers.FieldConv(4, 4, 3, grid, field, stride=2, dtype=F64), nn.Conv2d(4, 4, 3, 2, dtype=F64)
    ),
    "a convolution of points": lambda grid, field: (
        tplayers.FieldConv(4, 4, 1, grid, field, dtype=F64), nn.Conv2d(4, 4, 1, dtype=F64)
    ),
    "a transposed convolution": lambda grid, field: (
        tplayers.FieldConvTranspose(4, 4, 3, grid, field, stride=2, dtype=F64),
        nn.ConvTranspose2d(4, 4, 3, 2, dtype=F64),
    ),
    "a batch": lambda grid, field: (
        tplayers.FieldBatchNorm(4, grid, field, track_running_stats=False, dtype=F64), Formula(None, (0, 2, 3), EACH)
    ),
    "groups": lambda grid, field: (tplayers.FieldGroupNorm(2, 4, grid, field, dtype=F64), Formula(2, (2,), EACH)),
    "groups, plain": lambda grid, field: (
        tplayers.FieldGroupNorm(2, 4, grid, field, affine=False), Formula(2, (2,), None)
    ),
    "a field": lambda grid, field: (tplayers.FieldLayerNorm(4, grid, field, dtype=F64), Formula(1, (2,), (4, *POINTS))),
    "pooling": lambda grid, field: (tplayers.FieldAvgPool(3, grid, field, stride=1), nn.AvgPool2d(3, 1)),
}  # fmt: skip


def derivative(
    layer: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], leaves: Sequence[Tensor], ranks: int, order: int
) -> Sequence[Tensor]:
    """Of the loss, and then of the sum of sines of the derivative before. All ranks share what parameters have."""
    found = torch.autograd.grad(loss(layer(x)).sum(), leaves, create_graph=True)
    for _ in range(order - 1):
        total = sum(g.sin().sum() / (1 if leaf is x else ranks) for g, leaf in zip(found, leaves, strict=True))
        if not total.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves]
        found = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True, materialize_grads=True)
    return found


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_are_torchs(mpi_world, name, order):
    """By all leaves together, and by each of them alone: the graph of a linear loss of one leaf is the smallest."""
    with Communicator(mpi_world, device="cpu", timeout=60) as comm:
        grid = CartesianGrid(comm, (comm.size, 1))
        field = Decomposition(((9,) if comm.size == 1 else (4, 5), (5,)))
        ours, theirs = LAYERS[name](grid, field)
        with torch.no_grad():
            for seed, ((_, one), (_, other)) in enumerate(
                zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
            ):
                other.copy_(draw(*other.shape, seed=10 + seed))
                one.copy_(other.view_as(one))
        whole = draw(2, 4, *POINTS)
        weights = draw(*theirs(whole).shape, seed=3)
        mine = cut(weights, ours.output, grid)
        number = len(list(theirs.parameters()))
        for linear in range(comm.size):
            straight = torch.zeros(weights.shape, dtype=torch.bool)
            straight[(..., *ours.output.slices(mpi_world.bcast(grid.coords, root=linear)))] = True

            def of_whole(y: Tensor, straight: Tensor = straight) -> Tensor:
                return torch.where(straight, y, y.sin()) * weights

            def of_part(y: Tensor, linear: int = linear) -> Tensor:
                return (y if linear == comm.rank else y.sin()) * mine

            for wanted in (range(number + 1), *([n] for n in range(number + 1))):
                results = []
                for layer, x, loss, ranks in (
                    (theirs, whole.clone(), of_whole, 1), (ours, cut(whole, ours.input, grid), of_part, comm.size)
                ):  # fmt: skip
                    tensors = [x, *layer.parameters()]
                    leaves = [one.requires_grad_(n in wanted) for n, one in enumerate(tensors)]
                    leaves = [one for one in leaves if one.requires_grad]
                    results.append(derivative(layer, x, loss, leaves, ranks, order))
                for n, expected, found in zip(wanted, *results, strict=True):
                    found = joined(found, ours.input, grid) if n == 0 else found.detach().view_as(expected)
                    close(found, expected, f"by leaf {n} of {list(wanted)}, linear on {linear}", tolerance=1e-11)
