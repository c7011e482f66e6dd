"""FNO on a split field: the same on any grid, and it learns a shift."""

import pytest
import torch

import tplayers
from commengine import CartesianGrid, Communicator
from tests.support.fields.comparison import close, cut, draw, joined, same_bits

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


@pytest.fixture
def comm(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield comm


def trained(grid, field, data, target):
    """The losses of some steps and the last output, whole."""
    model = tplayers.FNO(2, 1, grid, field, width=4, modes=3, depth=2, dtype=torch.float64)
    tplayers.initialize(model, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = cut(data, field, grid), cut(target, field, grid)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        out = model(x)
        loss = (out - y).square().sum() / target.numel()
        loss.backward()
        optimizer.step()
        losses.append(sum(grid.comm.mpi.allgather(loss.item())))
    for name, parameter in model.named_parameters():
        same_bits(parameter, grid, name)
    return losses, joined(out, field, grid)


@pytest.mark.parametrize("axis", [0, 1])
def test_training_is_that_of_one_rank(comm, axis):
    data = draw(2, 2, 12, 10)
    target = data[:, :1].roll(2, -1)
    grid = CartesianGrid(comm, (comm.size, 1) if axis == 0 else (1, comm.size))
    losses, out = trained(grid, grid.decompose((12, 10)), data, target)
    with Communicator(comm.mpi.Split(comm.rank), device="cpu") as own:
        alone = CartesianGrid(own, (1, 1))
        expected, whole = trained(alone, alone.decompose((12, 10)), data, target)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert losses[-1] < losses[0]
    close(out, whole, tolerance=1e-8)
