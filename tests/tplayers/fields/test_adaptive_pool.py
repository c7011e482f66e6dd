"""Global pooling against torch's on the whole field; what the drawn cases of adaptive pooling leave out."""

import math

import pytest
import torch
from torch import nn

import commengine
import tplayers
from commengine import CartesianGrid, Communicator, Decomposition
from tests.support.fields.comparison import SHAPES, close, cut, draw, drawn_blocks, joined, numbers, same_bits

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

AVG = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
MAX = {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d}


@pytest.fixture(scope="module")
def comm(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield comm


def derivatives(pool, x, ranks, weights, way):
    """The result, its gradient, that of a penalty on it, and a Hessian product. All ranks compute one loss each."""
    x = x.clone().requires_grad_()
    y = pool(x)
    (first,) = torch.autograd.grad((torch.sin(y) * weights).sum() / ranks, x, create_graph=True)
    (penalty,) = torch.autograd.grad(first.pow(3).sum(), x, retain_graph=True)
    (product,) = torch.autograd.grad((first * way).sum(), x)
    return y, first, penalty, product


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_global_pooling_in_50_drawn_cases(comm, mode):
    number = numbers(3)
    for case in range(50):
        shape = SHAPES[comm.size][case % 3]
        grid = CartesianGrid(comm, shape)
        field = drawn_blocks(number, shape, 1, 4)
        whole = draw(number(1, 2), 3, *field.shape, seed=case)
        if case % 2:
            whole = whole.round()  # with equal values on several ranks, of which the first one has the gradient
        pool, theirs = tplayers.FieldGlobalPool(grid, field, mode=mode), {"avg": AVG, "max": MAX}[mode][len(shape)](1)
        weights, way = draw(*whole.shape[:2], *(1,) * len(shape), seed=100 + case), draw(*whole.shape, seed=200 + case)
        found = derivatives(pool, cut(whole, field, grid), grid.size, weights, cut(way, field, grid))
        expected = derivatives(theirs, whole, 1, weights, way)
        close(found[0], expected[0], "values")
        same_bits(found[0], grid)
        for name, one, other in zip(("gradient", "penalty", "product"), found[1:], expected[1:], strict=True):
            close(joined(one, field, grid), other, name)


def test_each_ranks_loss_is_a_term_of_the_sum(comm):
    grid = CartesianGrid(comm, (comm.size,))
    field = grid.decompose((3 * comm.size,))
    x = cut(draw(1, 1, *field.shape), field, grid).requires_grad_()
    ((1 + comm.rank) * tplayers.FieldGlobalPool(grid, field)(x)).sum().backward()
    close(x.grad, torch.full_like(x, sum(range(1, comm.size + 1)) / field.points()))


def test_a_nan_on_one_rank_is_the_maximum(comm):
    grid = CartesianGrid(comm, (comm.size,))
    x = torch.full((1, 2, 2), math.inf)
    x[0, 0, 1] = math.nan if comm.rank == comm.size - 1 else -math.inf
    y = tplayers.FieldGlobalPool(grid, grid.decompose((2 * comm.size,)), mode="max")(x)
    assert y[0, 0].isnan() and y[0, 1] == math.inf


@pytest.mark.mpi(min_size=2)
def test_what_global_pooling_sends(comm):
    grid = CartesianGrid(comm, (comm.size,))
    field = grid.decompose((2 * comm.size,))
    for mode, gathered in (("avg", []), ("max", [("all_gather", 2 * 6 * comm.size)])):
        pool = tplayers.FieldGlobalPool(grid, field, mode=mode)
        x = torch.ones(2, 3, 2, requires_grad=True)
        pool(x)
        with commengine.trace(comm) as log:
            pool(x).sum().backward()
        found = [(event.operation, event.elements) for event in log.events]
        assert found == [*gathered, ("all_reduce", 6), ("all_reduce", 6)]


@pytest.mark.parametrize("kind", [tplayers.FieldAdaptiveAvgPool, tplayers.FieldAdaptiveMaxPool])
def test_formats_and_dtypes_are_kept(comm, kind):
    grid = CartesianGrid(comm, (comm.size, 1))
    field = grid.decompose((7 * comm.size, 7))  # windows of two lengths
    theirs = (nn.AdaptiveAvgPool2d if kind is tplayers.FieldAdaptiveAvgPool else nn.AdaptiveMaxPool2d)((5, 3))
    whole = draw(1, 3, *field.shape).bfloat16()
    x = cut(whole, field, grid).contiguous(memory_format=torch.channels_last)
    pool = kind((5, 3), grid, field)
    y = pool(x)
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, cut(theirs(whole), pool.output, grid), check_stride=False)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_under_autocast_the_dtypes_are_torchs(comm, axes, dtype):
    grid = CartesianGrid(comm, (comm.size, 1, 1)[:axes])
    field = grid.decompose((4 * comm.size, 4, 4)[:axes])
    size = (comm.size, 1, 1)[:axes]
    whole = draw(1, 2, *field.shape).to(dtype)
    for ours, theirs in (
        (tplayers.FieldAdaptiveAvgPool(size, grid, field), AVG[axes](size if axes > 1 else comm.size)),
        (tplayers.FieldAdaptiveMaxPool(size, grid, field), MAX[axes](size if axes > 1 else comm.size)),
        (tplayers.FieldGlobalPool(grid, field), AVG[axes](1)),
        (tplayers.FieldGlobalPool(grid, field, mode="max"), MAX[axes](1)),
    ):
        x = cut(whole, field, grid).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = ours(x)
            assert y.dtype == theirs(whole).dtype
        y.sum().backward()
        assert x.grad.dtype == dtype


def test_arguments(comm):
    grid = CartesianGrid(comm, (comm.size,))
    field = grid.decompose((4 * comm.size,))
    with pytest.raises(ValueError, match="output_size=0 must be whole numbers of at least 1, or None"):
        tplayers.FieldAdaptiveAvgPool(0, grid, field)
    with pytest.raises(ValueError, match="mode='mean' must be one of avg, max"):
        tplayers.FieldGlobalPool(grid, field, mode="mean")
    if comm.size > 1:
        with pytest.raises(ValueError, match=r"output_size=1: each axis needs at least one output a rank.*GlobalPool"):
            tplayers.FieldAdaptiveMaxPool(1, grid, field)
    pool = tplayers.FieldAdaptiveAvgPool(comm.size + 1, grid, field, output=grid.decompose((comm.size + 1,)))
    assert pool.output == grid.decompose((comm.size + 1,))


def test_small_blocks_are_cut_evenly_where_a_rank_would_have_no_output(comm):
    """Each window of two begins in an input of a rank of even number, so the others would have none."""
    grid = CartesianGrid(comm, (comm.size,))
    field = Decomposition(((1,) * (comm.size - 1) + (comm.size + 2,),))
    pool, whole = tplayers.FieldMaxPool(2, grid, field), draw(1, 1, *field.shape)
    y = joined(pool(cut(whole, field, grid)), pool.output, grid)
    close(y, nn.functional.max_pool1d(whole, 2))
    assert pool.output == (grid.decompose(y.shape[2:]) if comm.size > 1 else pool.output)
