"""Second and third derivatives of layers of fields where the loss of one rank is linear in the result."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import tplayers
from commengine import CartesianGrid, Communicator, Decomposition
from tests.support.fields.comparison import close, cut, draw, joined

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, only=True), pytest.mark.slow]

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
    "three in a row": lambda grid, field: (
        nn.Sequential(
            tplayers.FieldConv(4, 4, 3, grid, field, padding=1, dtype=F64),
            tplayers.FieldGroupNorm(2, 4, grid, field, dtype=F64),
            tplayers.FieldConv(4, 4, 1, grid, field, dtype=F64),
        ),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, dtype=F64), Formula(2, (2,), EACH), nn.Conv2d(4, 4, 1, dtype=F64)),
    ),
    "pooling": lambda grid, field: (tplayers.FieldAvgPool(3, grid, field, stride=1), nn.AvgPool2d(3, 1)),
}  # fmt: skip


def derivative(
    layer: nn.Module, loss: Callable[[Tensor], Tensor], leaves: Sequence[Sequence[Tensor]], ranks: int
) -> Sequence[Tensor]:
    """Of the loss, and then of the sum of sines of the derivative before, each by its leaves. The first leaf is x.

    All ranks share what parameters have.
    """
    x = leaves[0][0]
    found = torch.autograd.grad(loss(layer(x)).sum(), leaves[1], create_graph=True)
    for before, by in itertools.pairwise(leaves[1:]):
        total = sum(g.sin().sum() / (1 if leaf is x else ranks) for g, leaf in zip(found, before, strict=True))
        if not total.requires_grad:
            return [torch.zeros_like(leaf) for leaf in by]
        found = torch.autograd.grad(total, by, create_graph=True, allow_unused=True, materialize_grads=True)
    return found


@pytest.mark.some(4)
@pytest.mark.parametrize("order", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_are_torchs(mpi_world, name, order):
    """By all leaves and by single ones, first and last: the graph of a linear loss of one leaf is the smallest."""
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
        whole, output = draw(2, 4, *POINTS), (ours[-1] if isinstance(ours, nn.Sequential) else ours).output
        weights = draw(*theirs(whole).shape, seed=3)
        mine = cut(weights, output, grid)
        number = len(list(theirs.parameters()))
        for linear in range(comm.size):
            straight = torch.zeros(weights.shape, dtype=torch.bool)
            straight[(..., *output.slices(mpi_world.bcast(grid.coords, root=linear)))] = True

            def of_whole(y: Tensor, straight: Tensor = straight) -> Tensor:
                return torch.where(straight, y, y.sin()) * weights

            def of_part(y: Tensor, linear: int = linear) -> Tensor:
                return (y if linear == comm.rank else y.sin()) * mine

            everything, single = range(number + 1), [[n] for n in range(number + 1)]
            for first, last in [*itertools.product([everything, *single], [everything, *single])]:
                results = []
                for layer, x, loss, ranks in (
                    (theirs, whole.clone(), of_whole, 1), (ours, cut(whole, field, grid), of_part, comm.size)
                ):  # fmt: skip
                    tensors = [x.requires_grad_(), *layer.parameters()]
                    leaves = [[tensors[n] for n in several] for several in (everything, first, *[last] * (order - 1))]
                    results.append(derivative(layer, loss, leaves, ranks))
                for n, expected, found in zip(last, *results, strict=True):
                    found = joined(found, field, grid) if n == 0 else found.detach().view_as(expected)
                    close(found, expected, f"first by {first}, last by {n}, linear on {linear}", tolerance=1e-11)
