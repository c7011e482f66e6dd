"""Upsampling against torch's on the whole field: all modes, drawn scales and blocks, wrapped fields, errors."""

import pytest
import torch
from torch import nn

import tplayers
from commengine import CartesianGrid, Communicator, Decomposition
from tests.support.fields.comparison import SHAPES, close, cut, draw, drawn_blocks, equals_torchs, joined, numbers
from tests.support.fields.second_derivatives import equals_torchs_twice, tangents_equal_torchs

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@pytest.fixture(scope="module")
def comm(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield comm


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize(
    ("kind", "align_corners"),
    [
        ("nearest", False),
        ("nearest-exact", False),
        ("linear", True),
        ("bicubic", False),
        *(pytest.param(k, k == "bicubic", marks=pytest.mark.long) for k in ("linear", "bicubic")),
    ],
)
def test_50_drawn_cases_of_each_mode(comm, kind, align_corners):
    number = numbers(4)
    for case in range(50):
        shape = SHAPES[comm.size][1 if kind == "bicubic" else case % 3]
        grid = CartesianGrid(comm, shape)
        field = drawn_blocks(number, shape, 1, 4)
        mode = LINEAR[len(shape)] if kind == "linear" else kind
        scale = tuple(number(1, 5) for _ in shape)
        options = {"align_corners": True} if align_corners else {}
        ours = tplayers.FieldUpsample(scale, grid, field, mode=mode, **options)
        theirs = nn.Upsample(scale_factor=tuple(map(float, scale)), mode=mode, **options)
        whole = draw(number(1, 2), 2, *field.shape, seed=case)
        equals_torchs(ours, theirs, whole, grid)
        equals_torchs_twice(ours, theirs, whole, grid)
        tangents_equal_torchs(ours, theirs, whole, grid)


@pytest.mark.parametrize("mode", ["linear", "bicubic"])
def test_a_circular_field_is_interpolated_around_its_ends(comm, mode):
    grid = CartesianGrid(comm, (comm.size, 1))
    field = Decomposition(((1,) * (comm.size - 1) + (3,), (4,)))
    whole = draw(1, 2, *field.shape)
    ours = tplayers.FieldUpsample(3, grid, field, mode=mode, padding_mode="circular")
    around = nn.functional.interpolate(
        whole.repeat(1, 1, 3, 3), scale_factor=3.0, mode=LINEAR[2] if mode == "linear" else mode
    )
    middle = around[..., 3 * field.shape[0] : 6 * field.shape[0], 12:24]
    close(joined(ours(cut(whole, field, grid)), ours.output, grid), middle)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_corners_of_half_precision_in_channels_last(comm, mode):
    grid = CartesianGrid(comm, (comm.size, 1))
    field = grid.decompose((3 * comm.size, 4))
    whole = draw(1, 3, *field.shape).bfloat16()
    ours = tplayers.FieldUpsample(2, grid, field, mode=mode, align_corners=True)
    y = ours(cut(whole, field, grid).contiguous(memory_format=torch.channels_last))
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=torch.channels_last)
    exact = nn.functional.interpolate(whole.double(), scale_factor=2.0, mode=mode, align_corners=True)
    torch.testing.assert_close(y.double(), cut(exact, ours.output, grid), rtol=2**-8, atol=2**-8, check_stride=False)


def test_arguments(comm):
    line, plane = CartesianGrid(comm, (comm.size,)), CartesianGrid(comm, (comm.size, 1))
    row, field = line.decompose((4 * comm.size,)), plane.decompose((4 * comm.size, 4))
    for grid, input, mode, fits in (
        (line, row, "bilinear", "1 axes: use linear"), (line, row, "bicubic", "1 axes: use linear"),
        (plane, field, "trilinear", "2 axes: use bilinear or bicubic"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"mode='{mode}' does not fit a field of {fits}$"):
            tplayers.FieldUpsample(2, grid, input, mode=mode)
    with pytest.raises(ValueError, match="align_corners=True needs a linear mode or bicubic, not mode='nearest'"):
        tplayers.FieldUpsample(2, plane, field, align_corners=True)
    with pytest.raises(ValueError, match="a circular field has no corners"):
        tplayers.FieldUpsample(2, plane, field, mode="linear", align_corners=True, padding_mode="circular")
