"""UNet on a split field against the same network of torch's layers on the whole field."""

import math

import pytest
import torch

import tplayers
from commengine import CartesianGrid, Communicator, Decomposition
from tests.support.fields.comparison import cut, draw, drawn_blocks, equals_torchs, numbers
from tests.support.fields.second_derivatives import equals_torchs_twice
from tests.support.models.whole_unet import WholeUNet

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

#: by the number of ranks: the grid, and the blocks of a field of 16 x 12 points
SPLITS = {
    1: ((1, 1), ((16,), (12,))),
    2: ((1, 2), ((16,), (7, 5))),
    3: ((3, 1), ((5, 6, 5), (12,))),
    4: ((2, 2), ((7, 9), (5, 7))),
}


@pytest.fixture
def grid(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield CartesianGrid(comm, SPLITS[comm.size][0])


@pytest.mark.parametrize(
    ("norm", "padding_mode", "kernel"), [("batch", "circular", 3), ("group", "reflect", 3), ("none", "zeros", 5)]
)
def test_equals_torchs_layers_on_the_whole_field(grid, norm, padding_mode, kernel):
    field = Decomposition(SPLITS[grid.size][1])
    options = {"width": 8, "depth": 2, "norm": norm, "padding_mode": padding_mode, "kernel_size": kernel}
    options["dtype"] = torch.float64
    torch.manual_seed(1)
    whole = WholeUNet(3, 2, 2, **options)
    equals_torchs(tplayers.UNet(3, 2, grid, field, **options), whole, draw(2, 3, *field.shape), grid, tolerance=1e-11)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # of torch's layer
def test_an_even_kernel(grid):
    """Torch pads the end more than the beginning, and so a rank computes outputs that are not its own."""
    field = Decomposition(SPLITS[grid.size][1])
    options = {"width": 4, "depth": 2, "kernel_size": 4, "dtype": torch.float64}
    torch.manual_seed(1)
    whole = WholeUNet(1, 2, 2, **options)
    for conv in (conv for level in (*whole.down, *whole.merge) for conv in level.conv):
        conv.padding = "same"
    equals_torchs(tplayers.UNet(1, 2, grid, field, **options), whole, draw(2, 1, *field.shape), grid, tolerance=1e-11)


@pytest.mark.parametrize("shape", [(16,), (8, 4, 4)])
def test_other_dimensions(grid, shape):
    grid = CartesianGrid(grid.comm, (grid.size, *(1 for _ in shape[1:])))
    field = grid.decompose(shape)
    options = {"width": 4, "depth": 2 if len(shape) == 1 else 1, "dtype": torch.float64}
    torch.manual_seed(1)
    whole = WholeUNet(2, 1, len(shape), **options)
    equals_torchs(tplayers.UNet(2, 1, grid, field, **options), whole, draw(2, 2, *shape), grid, tolerance=1e-11)


def test_training_is_the_same_on_every_rank_and_on_one(grid):
    """Three steps of any optimizer, from initialize's values: parameters with the same bits, losses as of one rank."""
    field = grid.decompose((16, 12))
    model = tplayers.UNet(1, 1, grid, field, width=4, depth=2, dtype=torch.float64)
    tplayers.initialize(model, seed=3)
    whole = WholeUNet(1, 1, 2, width=4, depth=2, dtype=torch.float64)
    whole.load_state_dict(model.state_dict())
    data, target = draw(2, 1, 16, 12), draw(2, 1, 16, 12, seed=1)
    losses = []
    for net, x, y in ((whole, data, target), (model, cut(data, field, grid), cut(target, field, grid))):
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = (net(x) - y).square().sum() / data.numel()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    summed = [sum(parts) for parts in zip(*grid.comm.mpi.allgather(losses[1]), strict=True)]
    assert summed == pytest.approx(losses[0], rel=1e-9)
    assert losses[0][2] < losses[0][0]
    for name, parameter in model.named_parameters():
        for other in grid.comm.mpi.allgather(parameter.detach().numpy()):
            assert torch.equal(torch.from_numpy(other), parameter), name


@pytest.mark.slow
@pytest.mark.sizes(2)
@pytest.mark.parametrize("norm", [pytest.param("batch", marks=pytest.mark.long), "group", "none"])
@pytest.mark.parametrize("examples", [3, pytest.param(50, marks=pytest.mark.long)])
def test_odd_sizes_and_small_blocks_in_drawn_cases(grid, norm, examples):
    """Blocks down to one point, axes that are odd on any level; values and derivatives to 1e-12."""
    number = numbers(6)
    cases = 0
    while cases < examples:
        axes, depth = number(1, 3), number(1, 2)
        shape = [1] * axes
        shape[number(0, axes - 1)] = grid.size
        if grid.size == 4 and axes > 1 and number(0, 1):
            shape = [2, 2, 1][:axes]
        split = CartesianGrid(grid.comm, shape)
        field = drawn_blocks(number, shape, 1, 6)
        if any(n // 2**depth < ranks for n, ranks in zip(field.shape, shape, strict=True)):
            continue
        if norm == "batch" and math.prod(n // 2**depth for n in field.shape) < 4:
            continue  # statistics of few values: torch's own second derivatives are exact to 6e-11 only
        cases += 1
        options = {"width": 4, "depth": depth, "norm": norm, "dtype": torch.float64}
        torch.manual_seed(cases)
        ours, whole = tplayers.UNet(2, 1, split, field, **options), WholeUNet(2, 1, axes, **options)
        data = draw(2, 2, *field.shape, seed=cases)
        equals_torchs(ours, whole, data, split)
        equals_torchs_twice(ours, whole, data, split)


def test_bad_arguments_raise_on_every_rank(grid):
    axis = max(range(2), key=lambda axis: grid.shape[axis])
    ranks = grid.shape[axis]
    few = 4 * ranks - 1
    field = grid.decompose([few if one == axis else 64 for one in range(2)])
    message = f"depth=2 leaves {ranks - 1} of the {few} points of axis {axis}, which {ranks} ranks split: use a smaller"
    with pytest.raises(ValueError, match=message):
        tplayers.UNet(1, 1, grid, field, depth=2)
    with pytest.raises(ValueError, match="must be one of batch, group, none"):
        tplayers.UNet(1, 1, grid, field, depth=1, norm="layer")
