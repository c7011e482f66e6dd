"""What the drawn cases of normalisation leave out: evaluation, large means, communication, one value."""

import pytest
import torch
from torch import nn

import commengine
import tplayers
from commengine import CartesianGrid, Communicator, Decomposition
from tests.support.fields.comparison import close, cut, draw, equals_torchs, joined

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


@pytest.fixture(scope="module")
def grid(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield CartesianGrid(comm, (comm.size, 1))


@pytest.fixture
def field(grid):
    return Decomposition(((3, *[5] * (grid.size - 1)), (6,)))


def test_evaluation_uses_the_running_statistics(grid, field):
    ours, theirs = (
        tplayers.FieldBatchNorm(3, grid, field, dtype=torch.float64),
        nn.BatchNorm2d(3, dtype=torch.float64),
    )
    tplayers.initialize(ours, 1)
    for seed in range(3):
        whole = 2 + draw(2, 3, *field.shape, seed=seed)
        ours(cut(whole, field, grid)), theirs(whole)
    with commengine.trace(grid.comm) as log:
        equals_torchs(ours.eval(), theirs.eval(), draw(2, 3, *field.shape), grid)
    assert [event.operation for event in log.events] == ["all_reduce"] * (grid.size > 1)  # of the parameters' gradients


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_an_instance_norm_trains_and_evaluates_as_torchs(grid, field, affine, momentum):
    options = {"affine": affine, "momentum": momentum, "track_running_stats": True, "dtype": torch.float64}
    ours, theirs = tplayers.FieldInstanceNorm(3, grid, field, **options), nn.InstanceNorm2d(3, **options)
    tplayers.initialize(ours, 1)
    for seed in range(3):
        whole = 2 + draw(2, 3, *field.shape, seed=seed)
        close(joined(ours(cut(whole, field, grid)), field, grid), theirs(whole))
    for name, value in theirs.named_buffers():
        close(ours.get_buffer(name), value, name)
    with commengine.trace(grid.comm) as log:
        equals_torchs(ours.eval(), theirs.eval(), draw(2, 3, *field.shape), grid)
    assert [event.operation for event in log.events] == ["all_reduce"] * (affine and grid.size > 1)


@pytest.mark.parametrize("kind", ["batch", "group", "layer"])
@pytest.mark.parametrize("most", [1, 16])
def test_a_large_mean_does_not_cancel_in_float32(grid, field, kind, most, monkeypatch):
    """Also where statistics are reduced, as on many ranks."""
    monkeypatch.setattr("tplayers.fields.normalise.GATHERED", most)
    layer = {
        "batch": lambda: tplayers.FieldBatchNorm(4, grid, field),
        "group": lambda: tplayers.FieldGroupNorm(2, 4, grid, field),
        "layer": lambda: tplayers.FieldLayerNorm(4, grid, field),
    }[kind]()
    tplayers.initialize(layer, 1)
    whole = (1e4 + draw(2, 4, *field.shape)).float()
    dims = {"batch": (0, 2, 3), "group": (2, 3, 4), "layer": (1, 2, 3)}[kind]
    exact = whole.double()
    exact = exact.unflatten(1, (2, 2)) if kind == "group" else exact
    exact = (exact - exact.mean(dims, keepdim=True)) / (exact.var(dims, keepdim=True, correction=0) + 1e-5).sqrt()
    found = joined(layer(cut(whole, field, grid)), field, grid).double()
    assert float((found - exact.view(found.shape)).abs().max()) < 5e-3  # the spacing of float32 at 1e4 is 1e-3


@pytest.mark.mpi(min_size=2)
def test_a_training_step_sends_two_numbers_a_channel_and_no_more(grid, field):
    layer = tplayers.FieldBatchNorm(5, grid, field)
    tplayers.initialize(layer, 1)
    x = cut(draw(2, 5, *field.shape), field, grid).float().requires_grad_()
    layer(x)
    with commengine.trace(grid.comm) as log:
        layer(x).square().sum().backward()
    assert [(event.operation, event.elements) for event in log.events] == [
        ("all_gather", (2 * 5 + 1) * grid.size), ("all_reduce", 2 * 5),
    ]  # fmt: skip


def test_a_frozen_layer_and_a_data_input(grid, field):
    """No gradient is computed that nobody wants, and those that are wanted are right."""
    theirs = nn.BatchNorm2d(3, dtype=torch.float64)
    ours = tplayers.FieldBatchNorm(3, grid, field, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    whole = draw(2, 3, *field.shape)
    theirs(whole).pow(3).sum().backward()
    ours(cut(whole, field, grid)).pow(3).sum().backward()
    close(ours.weight.grad, theirs.weight.grad)
    for layer in (ours, theirs):
        layer.requires_grad_(False)
    x, mine = whole.clone().requires_grad_(), cut(whole, field, grid).requires_grad_()
    theirs(x).pow(3).sum().backward()
    ours(mine).pow(3).sum().backward()
    close(mine.grad, cut(x.grad, field, grid))


def test_one_value_a_channel_is_refused_on_every_rank(grid):
    if grid.size == 1:
        with pytest.raises(ValueError, match="a field of more than one point"):
            tplayers.FieldInstanceNorm(1, grid, grid.decompose((1, 1)))(torch.zeros(2, 1, 1, 1))
    single = CartesianGrid(grid.comm, (grid.size,))
    field = Decomposition(((1,) * grid.size,))
    layer = tplayers.FieldBatchNorm(1, single, field)
    tplayers.initialize(layer, 1)
    if grid.size == 1:
        with pytest.raises(ValueError, match="more than one value a channel in training, not 1"):
            layer(torch.zeros(1, 1, 1))
    else:
        assert layer(torch.zeros(1, 1, 1)).shape == (1, 1, 1)
