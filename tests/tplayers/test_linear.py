"""Column- and row-parallel linear layers against torch's, with the assembled weights."""

import pytest
import torch
import torch.nn.functional as F

import commengine
from tplayers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    gather_from_tensor_parallel_region,
    placements,
    scatter_to_tensor_parallel_region,
    sum_partial_gradients,
)

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

IN, OUT = 8, 12
SHAPES = [(IN,), (3, IN), (2, 3, IN), (0, IN)]


def column(group, **options):
    return ColumnParallelLinear(IN, OUT, group.comm, dtype=torch.float64, **options)


def row(group, **options):
    return RowParallelLinear(IN, OUT, group.comm, dtype=torch.float64, **options)


def blockwise(group, whole, blocks):
    """This rank's columns of ``whole``, which is ``blocks`` blocks, each split over the ranks."""
    return torch.cat([group.mine(block) for block in whole.chunk(blocks, -1)], -1)


def expected(wholes, x, gradient):
    """Output, input gradient and parameter gradients of torch's linear layer."""
    y = F.linear(x, wholes["weight"], wholes.get("bias"))
    leaves = [x, *wholes.values()]
    grads = torch.autograd.grad(y, leaves, gradient)
    return y.detach(), grads[0], dict(zip(wholes, grads[1:], strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("blocks", [1, 3])
def test_column(group, random, close, blocks, bias, shape):
    layer = column(group, bias=bias, blocks=blocks)
    wholes = group.fill(layer)
    x = random(*shape).requires_grad_()
    gradient = random(*shape[:-1], OUT, seed=1)
    y, x_grad, grads = expected(wholes, x, gradient)

    mine = layer(x)
    close(mine, blockwise(group, y, blocks))
    mine.backward(blockwise(group, gradient, blocks))
    close(group.same(x.grad), x_grad)
    close(group.gradients(layer), grads)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_replicated(group, random, close, sequence_parallel):
    """Every rank holds the weight; of a sequence shard the gradients are parts of their sum. Nothing is sent."""
    layer = ReplicatedLinear(IN, OUT, sequence_parallel=sequence_parallel, dtype=torch.float64)
    wholes = group.fill(layer)
    x = random(4, 2, IN).requires_grad_()
    gradient = random(4, 2, OUT, seed=1)
    y, x_grad, grads = expected(wholes, x, gradient)
    mine = group.mine if sequence_parallel else lambda whole, dim: whole.clone()
    shard = mine(x.detach(), 0).requires_grad_()
    with commengine.trace(group.comm) as log:
        found = layer(shard)
        found.backward(mine(gradient, 0))
    assert not log.events
    close(found.detach(), mine(y, 0))
    close(shard.grad, mine(x_grad, 0))
    assert [placement.partial for placement in placements(layer).values()] == [sequence_parallel] * 2
    sum_partial_gradients(layer, group.comm)
    close(group.gradients(layer), grads)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_column_with_gathered_output(group, random, close, bias, shape):
    layer = column(group, bias=bias)
    wholes = group.fill(layer)
    x = random(*shape).requires_grad_()
    gradient = random(*shape[:-1], OUT, seed=1)
    y, x_grad, grads = expected(wholes, x, gradient)

    whole = gather_from_tensor_parallel_region(layer(x), group.comm)
    close(group.same(whole), y)
    whole.backward(gradient)
    close(group.same(x.grad), x_grad)
    close(group.gradients(layer), grads)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_row(group, random, close, parallel, bias, shape):
    layer = row(group, bias=bias)
    wholes = group.fill(layer)
    whole = random(*shape).requires_grad_()
    gradient = random(*shape[:-1], OUT, seed=1)
    y, x_grad, grads = expected(wholes, whole, gradient)

    x = (group.mine(whole.detach()) if parallel else whole.detach().clone()).requires_grad_()
    out = layer(x if parallel else scatter_to_tensor_parallel_region(x, group.comm))
    close(group.same(out), y)
    out.backward(gradient)
    close(group.joined(x.grad) if parallel else group.same(x.grad), x_grad)
    close(group.gradients(layer), grads)


def test_row_bias_is_added_once_and_its_gradient_counted_once(group, whole_numbers):
    layer = row(group)
    group.fill(layer)
    with torch.no_grad():
        layer.weight.zero_()
    y = layer(torch.ones(5, IN // group.size).double())
    assert torch.equal(y, layer.bias.expand(5, OUT))
    gradient = whole_numbers(5, OUT)
    y.backward(gradient)
    assert torch.equal(group.same(layer.bias.grad), gradient.sum(0))


@pytest.mark.parametrize("blocks", [1, 3])
def test_column_numerically(group, random, blocks):
    layer = ColumnParallelLinear(4, 12, group.comm, blocks=blocks, dtype=torch.float64)
    group.numerically_right(layer, group.fill(layer), random(2, 4), "out")


def test_row_numerically(group, random):
    layer = RowParallelLinear(8, 3, group.comm, dtype=torch.float64)
    group.numerically_right(layer, group.fill(layer), random(2, 8), "in")


def test_layouts_that_are_not_contiguous(group, random, close):
    """An input that is a transposed view, as attention makes them, and an output gradient that is one."""
    layer = row(group)
    wholes = group.fill(layer)
    base = random(2, 3, IN).requires_grad_()
    gradient = random(3, OUT, 2, seed=1).permute(2, 0, 1)
    y, x_grad, grads = expected(wholes, base, gradient)

    x = base.detach().movedim(-1, 0).contiguous().movedim(0, -1).requires_grad_()
    out = layer(scatter_to_tensor_parallel_region(x, group.comm))
    close(out, y)
    out.backward(gradient)
    close(x.grad, x_grad)
    close(group.gradients(layer), grads)

    layer = column(group)
    wholes = group.fill(layer)
    y, x_grad, grads = expected(wholes, base, gradient)
    x = x.detach().requires_grad_()
    layer(x).backward(group.mine(gradient.contiguous()).movedim(0, 1).contiguous().movedim(0, 1))
    close(x.grad, x_grad)
    close(group.gradients(layer), grads)


def test_one_input_of_two_layers(group, random, close):
    """Two column layers and a replicated use share x: each f sums its own branch, and nothing twice."""
    one, two = column(group), column(group)
    a, b = group.fill(one, seed=1), group.fill(two, seed=2)
    x = random(3, IN).requires_grad_()
    x_expected = x.detach().clone().requires_grad_()
    (F.linear(x_expected, a["weight"], a["bias"]) * F.linear(x_expected, b["weight"], b["bias"])).sum().backward()
    x_expected.square().sum().backward()

    (one(x) * two(x)).sum().backward()  # each rank's part of the loss
    x.square().sum().backward()
    close(x.grad, x_expected.grad)


def test_input_without_gradient_needs_no_communication_backward(group, random):
    layer = column(group)
    group.fill(layer)
    y = layer(random(3, IN))
    with commengine.trace(group.comm) as log:
        y.sum().backward()
    assert log.events == []
    assert layer.weight.grad is not None


def test_frozen_parameters(group, random, close):
    """A frozen layer passes the gradient of its input on, and gets none itself."""
    layer = column(group).requires_grad_(False)
    wholes = group.fill(layer)
    x, gradient = random(3, IN).requires_grad_(), random(3, OUT, seed=1)
    _, x_grad, _ = expected(wholes, x, gradient)
    layer(x).backward(group.mine(gradient))
    close(x.grad, x_grad)
    assert layer.weight.grad is None
    assert layer.bias.grad is None
