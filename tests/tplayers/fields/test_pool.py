"""Pooling with ceil_mode against torch's on the whole field."""

import pytest
from torch import nn

import tplayers
from commengine import CartesianGrid, Communicator
from tests.support.fields.comparison import SHAPES, draw, drawn_blocks, equals_torchs, numbers
from tests.support.fields.second_derivatives import equals_torchs_twice, tangents_equal_torchs

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

AVG = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
MAX = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}


@pytest.mark.slow
@pytest.mark.sizes(1, 2)
@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["max", "avg", "avg of inputs alone"])
def test_ceil_mode_in_50_drawn_cases(mpi_world, kind):
    number = numbers(8)
    with Communicator(mpi_world, device="cpu") as comm:
        cases = beyond = 0
        while cases < 50:
            shape = SHAPES[comm.size][cases % 3]
            axes, grid = len(shape), CartesianGrid(comm, shape)
            field = drawn_blocks(number, shape, 1, 6)
            kernel = tuple(number(1, 4) for _ in shape)
            options = {"stride": tuple(number(1, 4) for _ in shape), "ceil_mode": True}
            options["padding"] = tuple(number(0, k // 2) for k in kernel)
            if kind == "max":
                options["dilation"] = tuple(number(1, 2) for _ in shape)
            else:
                options["count_include_pad"] = kind == "avg"
            whole = draw(1, 2, *field.shape, seed=cases)
            try:
                theirs = (MAX if kind == "max" else AVG)[axes](kernel, **options)
                y = theirs(whole)
                without = (MAX if kind == "max" else AVG)[axes](kernel, **options | {"ceil_mode": False})(whole)
            except RuntimeError:
                continue  # torch refuses so few points
            if not y.isfinite().all():
                continue  # torch's result of a window without any input is not defined
            layer = tplayers.FieldMaxPool if kind == "max" else tplayers.FieldAvgPool
            try:
                ours = layer(kernel, grid, field, **options)
            except ValueError:
                assert any(n < ranks for n, ranks in zip(y.shape[2:], shape, strict=True))
                continue
            cases, beyond = cases + 1, beyond + (y.shape != without.shape)
            equals_torchs(ours, theirs, whole, grid)
            equals_torchs_twice(ours, theirs, whole, grid)
            tangents_equal_torchs(ours, theirs, whole, grid)
        assert beyond >= 10
