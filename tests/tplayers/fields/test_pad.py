"""Padding and cropping of split fields, against torch on the whole field."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tplayers
from commengine import CartesianGrid, Communicator, Decomposition
from tests.support.fields.comparison import SHAPES, draw, equals_torchs

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


class Pad(nn.Module):
    def __init__(self, *padding):
        super().__init__()
        self.padding = padding

    def forward(self, x):
        return F.pad(x, *self.padding)


@pytest.fixture
def comm(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield comm


def split(comm, axes):
    grid = CartesianGrid(comm, SHAPES[comm.size][axes - 1])
    return grid, Decomposition(tuple(tuple(3 + (axis + n) % 3 for n in range(p)) for axis, p in enumerate(grid.shape)))


@pytest.mark.parametrize(
    ("axes", "padding", "mode", "value"),
    [
        (1, (2, 1), "constant", 0.0),
        (1, (7, 0), "constant", -1.5),
        (1, (2, 2), "circular", 0.0),
        (2, (1, 2, 0, 2), "reflect", 0.0),
        (2, (1, 1, 2, 2), "constant", 3.0),
        (2, (5, 0, 1, 4), "replicate", 0.0),
        (2, (-1, -2), "constant", 0.0),
        (2, (-1, 2, 3, -2), "constant", 1.0),
        (2, (-1, -1, -1, -1), "constant", 1.0),
        (2, (0, 0, 0, 0), "constant", 1.0),
        (3, (1, 1, 0, 2, 2, 0), "replicate", 0.0),
        (3, (1, -1, 0, 2), "constant", 2.0),
    ],
)
def test_equals_torch(comm, axes, padding, mode, value):
    grid, field = split(comm, axes)
    layer = tplayers.FieldPad(padding, grid, field, mode=mode, value=value)
    equals_torchs(layer, Pad(padding, mode, value), draw(2, 3, *field.shape), grid)


def test_one_number_and_another_decomposition(comm):
    grid, field = split(comm, 2)
    even = Decomposition.even(tuple(n + 4 for n in field.shape), grid.shape)
    layer = tplayers.FieldPad(2, grid, field, output=even)
    assert layer.output == even
    equals_torchs(layer, nn.ZeroPad2d(2), draw(1, 2, *field.shape), grid)


def test_the_result_has_memory_of_its_own(comm):
    grid, field = split(comm, 2)
    x = torch.ones(1, 1, *field.local_shape(grid.coords))
    tplayers.FieldPad(0, grid, field)(x).add_(1)
    assert x.max() == 1


@pytest.mark.parametrize(
    ("padding", "mode", "why"),
    [
        ((1,), "constant", "two whole numbers"),
        ((1, 1, 1, 1, 1, 1), "constant", "two whole numbers"),
        ((1, 1.0), "constant", "two whole numbers"),
        ((-1, 0), "reflect", "crops, which needs mode='constant'"),
        ((1, 1), "mirror", "mode"),
        ((-50, 0), "constant", "no output"),
        ((0, 40), "reflect", ""),
    ],
)
def test_arguments_that_do_not_fit_are_refused_on_every_rank(comm, padding, mode, why):
    grid, field = split(comm, 2)
    with pytest.raises(ValueError, match=why):
        tplayers.FieldPad(padding, grid, field, mode=mode)
