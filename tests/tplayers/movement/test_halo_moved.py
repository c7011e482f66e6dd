"""Rolls and flips of split fields against torch's of the whole field."""

import pytest
import torch

import tplayers
from commengine import CartesianGrid, CollectiveError, CollectiveMismatch, Decomposition, trace
from tests.support.adjoints import assert_dot_product
from tests.support.fields.comparison import SHAPES, cut, draw, drawn_blocks, numbers
from tplayers.movement.halo import flip, roll

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_50_drawn_fields(world, dtype):
    """Blocks of any sizes, none included; shifts around the field several times."""
    number = numbers(5)
    for case in range(50):
        shape = SHAPES[world.size][case % 3]
        axes = len(shape)
        grid = CartesianGrid(world, shape, tuple(bool(number(0, 1)) for _ in shape))
        field = drawn_blocks(number, shape, 0, 4)
        whole = draw(2, *field.shape, seed=case).to(dtype)
        along = [axis for axis in range(axes) if number(0, 1)]
        shifts = [number(-15, 15) for _ in along]
        dims = [axis - axes for axis in along]
        blocks = None if case % 2 else field
        x = cut(whole, field, grid)

        def rolled(x, grid=grid, shifts=shifts, along=along, blocks=blocks):
            return roll(x, grid, shifts, along, decomposition=blocks)

        expected = torch.roll(whole, shifts, dims) if dims and whole.numel() else whole
        assert torch.equal(assert_dot_product(rolled, x, world), cut(expected, field, grid))

        def flipped(x, grid=grid, dims=dims, blocks=blocks):
            return flip(x, grid, dims, decomposition=blocks)

        assert torch.equal(assert_dot_product(flipped, x, world), cut(torch.flip(whole, dims), field, grid))


def test_one_axis_and_an_axis_twice(world):
    grid = CartesianGrid(world, (world.size,))
    field = Decomposition(((1,) * (world.size - 1) + (3,),))
    whole = draw(2, *field.shape)
    x = cut(whole, field, grid)
    assert torch.equal(roll(x, grid, 1, 0), cut(torch.roll(whole, 1, 1), field, grid))
    assert torch.equal(roll(x, grid, (1, 3), (0, -1)), cut(torch.roll(whole, 4, 1), field, grid))
    assert torch.equal(flip(x, grid, -1), cut(torch.flip(whole, [1]), field, grid))


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.sizes(2)
@pytest.mark.filterwarnings("error:Dynamo")
@pytest.mark.parametrize("name", ["roll", "flip", "halo_exchange", "halo_accumulate", "shift", "repartition"])
def test_the_compiler_runs_an_operator_between_graphs(world, name):
    grid = CartesianGrid(world, (world.size,))
    field = grid.decompose((5 * world.size,))
    operator = {
        "roll": lambda x: roll(x, grid, 2, 0, decomposition=field),
        "flip": lambda x: flip(x, grid, 0, decomposition=field),
        "halo_exchange": lambda x: tplayers.halo_exchange(x, grid, 1, decomposition=field),
        "halo_accumulate": lambda x: tplayers.halo_accumulate(x, grid, 1, decomposition=field),
        "shift": lambda x: tplayers.shift(x, grid, 0),
        "repartition": lambda x: tplayers.repartition(x, world, field, field),
    }[name]
    torch._dynamo.reset()
    x = draw(2, 7 if name == "halo_accumulate" else 5, seed=world.rank).requires_grad_()
    compiled = torch.compile(lambda x: operator(x.cos()).sin(), backend="aot_eager")
    found, expected = compiled(x), operator(x.cos()).sin()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (found, expected)))


@pytest.mark.mpi(min_size=2)
def test_a_rank_sends_only_points_that_leave_it(world):
    grid = CartesianGrid(world, (world.size,))
    field = grid.decompose((5 * world.size,))
    with trace(world) as log:
        roll(torch.zeros(5), grid, 2, 0, decomposition=field)
        flip(torch.zeros(5), grid, 0, decomposition=field)
    assert [event.bytes for event in log.events] == [4 * (2 + 2), 4 * (5 + 5)]


def test_bad_arguments_raise_on_every_rank(world):
    grid = CartesianGrid(world, (world.size,))
    field = grid.decompose((2 * world.size,))
    x = torch.zeros(2)
    with pytest.raises(ValueError, match=r"roll: shifts=\[1, 2\] and axes=0 must be equally many"):
        roll(x, grid, [1, 2], 0, decomposition=field)
    with pytest.raises(ValueError, match=r"flip: axes=\[0, -1\] must name an axis once at most"):
        flip(x, grid, [0, -1], decomposition=field)
    with pytest.raises(CollectiveError, match="axis 1 is not an axis of a grid"):
        flip(x, grid, 1, decomposition=field)
    with pytest.raises(ValueError, match="does not fit"):
        roll(x, grid, 1, 0, decomposition=Decomposition(((2,),) * 2))
    if world.size > 1:
        field, x, first = grid.decompose((9 * world.size,)), torch.zeros(9), world.rank == 0  # not compared before
        with pytest.raises(CollectiveMismatch, match=r"asked for roll by \[1\] of float32"):
            roll(torch.zeros(9 + first), grid, 1, 0, decomposition=field)
        with pytest.raises(CollectiveMismatch, match=r"asked for roll by \[2\]"):
            roll(x, grid, 2 + first, 0, decomposition=field)
        with pytest.raises(CollectiveMismatch, match=r"asked for flip along \[\]"):
            flip(x, grid, [] if first else 0, decomposition=field)
