"""Interpolation between meshes against NumPy's, axis after axis, and its adjoint against the transpose."""

import numpy as np
import pytest
import torch
from torch import nn

import tplayers
from commengine import CartesianGrid, Communicator, Decomposition
from tests.support.fields.comparison import SHAPES, close, cut, draw, drawn_blocks, equals_torchs, joined, numbers
from tests.support.fields.second_derivatives import equals_torchs_twice, tangents_equal_torchs

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


@pytest.fixture(scope="module")
def comm(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield comm


def coordinates(points, n, m):
    """The coordinates of both meshes."""
    if points == "cells":
        return (np.arange(n) + 0.5) / n, (np.arange(m) + 0.5) / m
    if points == "corners":
        return np.linspace(0, 1, n), np.linspace(0, 1, m)
    return points


def matrix(points, n, m):
    """[m, n]: what each output takes of each input."""
    rows = []
    for j in range(n):
        unit = np.eye(n)[j]
        if points == "periodic":
            rows.append(np.interp(np.arange(m) / m, np.arange(n + 1) / n, [*unit, unit[0]]))
        else:
            before, after = coordinates(points, n, m)
            rows.append(np.interp(after, before, unit))
    return torch.from_numpy(np.stack(rows, axis=1))


class Whole(nn.Module):
    """The interpolation of the whole field."""

    def __init__(self, points, field, into):
        super().__init__()
        self.of_axes = [matrix(*one) for one in zip(points, field.shape, into.shape, strict=True)]

    def forward(self, x):
        for dim, of_axis in enumerate(self.of_axes, start=2):
            x = torch.tensordot(x, of_axis, ([dim], [1])).movedim(-1, dim)
        return x


def drawn_points(number, n, m):
    kind = number(0, 3)
    if kind < 3:
        return ["cells", "corners", "periodic"][kind]
    generator = np.random.default_rng(number(0, 10**6))
    return tuple(np.cumsum(generator.uniform(0.1, 1, size)) - generator.uniform(0, 2) for size in (n, m))


@pytest.mark.parametrize("examples", [10, pytest.param(50, marks=pytest.mark.long)])
def test_drawn_meshes(comm, examples):
    number = numbers(5)
    for case in range(examples):
        shape = SHAPES[comm.size][case % 3]
        grid = CartesianGrid(comm, shape)
        field, into = (drawn_blocks(number, shape, 1, 5) for _ in range(2))
        points = [drawn_points(number, n, m) for n, m in zip(field.shape, into.shape, strict=True)]
        layer = tplayers.FieldResample(grid, field, into, points)
        whole = draw(2, 2, *field.shape, seed=case)
        equals_torchs(layer, Whole(points, field, into), whole, grid, tolerance=1e-13)
        equals_torchs_twice(layer, Whole(points, field, into), whole, grid)
        tangents_equal_torchs(layer, Whole(points, field, into), whole, grid)


def test_the_adjoint_is_the_transpose(comm):
    """<A x, y> = <x, A' y> to 1e-14 of the larger norm."""
    grid = CartesianGrid(comm, (comm.size,))
    field, into = (Decomposition(((n,) * comm.size,)) for n in (7, 11))
    layer = tplayers.FieldResample(grid, field, into, "corners")
    x = cut(draw(1, 3, *field.shape), field, grid).requires_grad_()
    y = layer(x)
    w = cut(draw(1, 3, *into.shape, seed=1), into, grid)
    (back,) = torch.autograd.grad(y, x, w)
    sides = [sum(comm.mpi.allgather(float((a * b).detach().sum()))) for a, b in ((y, w), (x, back))]
    assert abs(sides[0] - sides[1]) <= 1e-14 * 33 * comm.size


def test_a_linear_function_stays_one_between_corners(comm):
    grid = CartesianGrid(comm, (comm.size,))
    field, into = (grid.decompose((n * comm.size,)) for n in (5, 8))
    whole = torch.linspace(-1, 2, field.points(), dtype=torch.float64)[None, None]
    found = joined(tplayers.FieldResample(grid, field, into, "corners")(cut(whole, field, grid)), into, grid)
    close(found, torch.linspace(-1, 2, into.points(), dtype=torch.float64)[None, None])


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ("middle", "must be 'cells', 'corners', 'periodic' or coordinates"),
        ([(range(3), range(4))], "axis 0 needs .* ascending coordinates"),
        ("blocks", "must give each of"),
    ],
)
def test_meshes_that_do_not_fit(comm, points, words):
    grid = CartesianGrid(comm, (comm.size,))
    into = Decomposition(((5,) * (comm.size - 1) + (0,),)) if points == "blocks" else grid.decompose((5 * comm.size,))
    with pytest.raises(ValueError, match=words):
        tplayers.FieldResample(grid, grid.decompose((4 * comm.size,)), into, points)
