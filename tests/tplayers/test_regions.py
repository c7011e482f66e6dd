"""The six regions against their definitions, against finite differences, and on tensors that autograd shares."""

import pytest
import torch

import commengine
import tplayers
from tplayers.regions import reduce_own_from_tensor_parallel_region

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

SHAPE = (4, 8, 4)
DIMS = (0, 1, 2, -1, -3)


def contiguous(x):
    return x.contiguous()


def transposed(x):
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def strided(x):
    roomy = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
    roomy[..., 1::2] = x
    return roomy[..., 1::2]


LAYOUTS = (contiguous, transposed, strided)


def f(x, comm, dim):
    return tplayers.copy_to_tensor_parallel_region(x, comm)


def g(x, comm, dim):
    return tplayers.reduce_from_tensor_parallel_region(x, comm)


def part(x, rank, size, dim):
    return x.chunk(size, dim)[rank]


# region -> (what rank r gets from the ranks' inputs, the gradient it gets from the ranks' output gradients)
DEFINITIONS = {
    f: (lambda xs, r, d: xs[r], lambda gs, r, d: sum(gs)),
    g: (lambda xs, r, d: sum(xs), lambda gs, r, d: gs[r]),
    tplayers.scatter_to_tensor_parallel_region: (
        lambda xs, r, d: part(xs[r], r, len(xs), d),
        lambda gs, r, d: torch.cat(gs, d),
    ),
    tplayers.gather_from_tensor_parallel_region: (
        lambda xs, r, d: torch.cat(xs, d),
        lambda gs, r, d: part(gs[r], r, len(gs), d),
    ),
    tplayers.gather_from_sequence_parallel_region: (
        lambda xs, r, d: torch.cat(xs, d),
        lambda gs, r, d: part(sum(gs), r, len(gs), d),
    ),
    tplayers.reduce_scatter_to_sequence_parallel_region: (
        lambda xs, r, d: part(sum(xs), r, len(xs), d),
        lambda gs, r, d: torch.cat(gs, d),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("region", DEFINITIONS)
def test_definition(group, whole_numbers, region, layout):
    """Forward and backward are exact, whatever the layout, and change neither input nor gradient."""
    forward, backward = DEFINITIONS[region]
    for dim in DIMS if region not in (f, g) else (0,):
        xs = [whole_numbers(*SHAPE, seed=rank) for rank in range(group.size)]
        x = layout(xs[group.rank]).requires_grad_()
        y = region(x, group.comm, dim)
        assert torch.equal(y, forward(xs, group.rank, dim))

        gs = [whole_numbers(*y.shape, seed=10 + rank) for rank in range(group.size)]
        gradient = layout(gs[group.rank])
        y.backward(gradient)
        assert torch.equal(x.grad, backward(gs, group.rank, dim))
        assert torch.equal(x, xs[group.rank])
        assert torch.equal(gradient, gs[group.rank])


@pytest.mark.parametrize("region", DEFINITIONS)
def test_expanded_gradient(group, region):
    """The gradient of sum() is one number, expanded: strides 0."""
    x = torch.ones(SHAPE, dtype=torch.float64, requires_grad=True)
    y = region(x, group.comm, 1)
    y.sum().backward()
    _, backward = DEFINITIONS[region]
    assert torch.equal(x.grad, backward([torch.ones_like(y)] * group.size, group.rank, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("region", DEFINITIONS)
def test_dtype_is_kept(group, region, dtype):
    x = torch.ones(SHAPE, dtype=dtype, requires_grad=True)
    y = region(x, group.comm, 0)
    y.backward(torch.ones_like(y))
    assert y.dtype == x.grad.dtype == dtype


# As functions of global tensors ------------------------------------------------------------------------------------


def compositions(comm, weights):
    """Functions of a tensor that all ranks hold, each with every rank's own nonlinear step in the middle."""

    def step(x):
        return torch.tanh(x * weights.flatten()[: x.numel()].view_as(x))

    def split(x, dim):
        return tplayers.scatter_to_tensor_parallel_region(x, comm, dim)

    def join(x, dim):
        return tplayers.gather_from_tensor_parallel_region(x, comm, dim)

    return {
        "f g": lambda x, dim: g(step(f(x, comm, 0)), comm, 0),
        "scatter gather": lambda x, dim: join(step(split(x, dim)), dim),
        "scatter, sequence gather, g": lambda x, dim: g(
            step(tplayers.gather_from_sequence_parallel_region(step(split(x, dim)), comm, dim)), comm, 0
        ),
        "f, reduce-scatter, gather": lambda x, dim: join(
            step(tplayers.reduce_scatter_to_sequence_parallel_region(step(f(x, comm, 0)), comm, dim)), dim
        ),
        "two branches": lambda x, dim: g(step(f(x, comm, 0)) * step(f(x * x, comm, 0)), comm, 0) * x,
        "g on a saved tensor": lambda x, dim: (lambda h: g(h, comm, 0) + g(h * h, comm, 0))(f(x, comm, 0).exp()),
    }


@pytest.mark.parametrize("name", compositions(None, None))
def test_numerical_gradient(group, random, name):
    weights = random(32, seed=50 + group.rank)  # every rank's own: a lost or doubled term is no multiple of the rest
    function = compositions(group.comm, weights)[name]
    x = random(4, 4, seed=7).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: function(x, 0), x)  # every element
    assert torch.autograd.gradcheck(lambda x: function(x, 1), x, fast_mode=True)
    assert torch.autograd.gradcheck(lambda x: function(x.t(), -1), x, fast_mode=True)


# Tensors that autograd shares --------------------------------------------------------------------------------------


def test_f_of_one_tensor_in_two_branches(group, whole_numbers):
    a, b, c = ([whole_numbers(3, 5, seed=10 * i + r) for r in range(group.size)] for i in (1, 2, 3))
    x = whole_numbers(3, 5).requires_grad_()
    y = (f(x, group.comm, 0) * a[group.rank]).sum() + (f(x, group.comm, 0) * b[group.rank]).sum()
    (y + (x * c[0]).sum()).backward()
    assert torch.equal(x.grad, sum(a) + sum(b) + c[0])


@pytest.mark.parametrize("order", ["f first", "f last", "f twice"])
def test_gradient_tensor_with_two_consumers(group, whole_numbers, order):
    """An addition hands both its inputs one and the same gradient tensor: f must not reduce it in place."""
    gradients = [whole_numbers(3, 5, seed=r) for r in range(group.size)]
    x, y = torch.zeros(3, 5).double().requires_grad_(), torch.zeros(3, 5).double().requires_grad_()
    comm = group.comm
    total = {
        "f first": lambda: f(x, comm, 0) + y,
        "f last": lambda: y + f(x, comm, 0),
        "f twice": lambda: f(x, comm, 0) + f(y, comm, 0),
    }[order]()
    mine = gradients[group.rank].clone()
    total.backward(mine)
    assert torch.equal(x.grad, sum(gradients))
    assert torch.equal(y.grad, sum(gradients) if order == "f twice" else gradients[group.rank])
    assert torch.equal(mine, gradients[group.rank])


def test_gradients_of_g_do_not_share_memory(group):
    """The backward of g is the identity: what one consumer does to its gradient must not reach another."""
    x, y = torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    (g(x, group.comm, 0) + y).backward(torch.ones(4))
    x.grad.mul_(7)
    assert torch.equal(y.grad, torch.ones(4))


def test_g_leaves_a_saved_tensor_alone(group, whole_numbers):
    xs = [whole_numbers(6, seed=r) / 32 for r in range(group.size)]
    x = xs[group.rank].clone().requires_grad_()
    h = x.exp()  # saves its output
    (h.square().sum() + g(h, group.comm, 0).sum()).backward()
    expected = xs[group.rank].exp()
    torch.testing.assert_close(h.detach(), expected)
    torch.testing.assert_close(x.grad, 2 * expected.square() + expected)


def test_backward_twice_over_a_retained_graph(group, whole_numbers):
    x = whole_numbers(4, 4).requires_grad_()
    y = tplayers.gather_from_sequence_parallel_region(f(x, group.comm, 0), group.comm, 0)
    y.sum().backward(retain_graph=True)
    once = x.grad.clone()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * once)


def test_reduce_own_reduces_where_it_lies(group, whole_numbers):
    xs = [whole_numbers(4, 4, seed=r) for r in range(group.size)]
    x = xs[group.rank].clone().requires_grad_()
    own = x @ torch.eye(4).double()
    address = own.data_ptr()
    y = reduce_own_from_tensor_parallel_region(own, group.comm)
    assert y.data_ptr() == address
    assert torch.equal(y, sum(xs))
    gradient = whole_numbers(4, 4, seed=99)
    y.backward(gradient)
    assert torch.equal(x.grad, gradient)


@pytest.mark.mpi(min_size=2)
def test_reduce_own_of_a_tensor_that_something_saved_raises(group):
    x = torch.ones(4, requires_grad=True)
    saved = x.exp()
    y = reduce_own_from_tensor_parallel_region(saved, group.comm)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "region", [tplayers.scatter_to_tensor_parallel_region, tplayers.reduce_scatter_to_sequence_parallel_region]
)
def test_dimension_that_does_not_divide(group, region):
    with pytest.raises(ValueError, match=r"dimension 1 of \[4, 3\] does not divide into \d equal parts"):
        region(torch.zeros(4, 3), group.comm, 1)


@pytest.mark.parametrize("region", DEFINITIONS)
def test_group_of_one_communicates_nothing(alone, region):
    x = torch.ones(SHAPE, requires_grad=True)
    with commengine.trace(alone.comm) as log:
        region(x, alone.comm, 1).sum().backward()
    assert log.events == []
    assert torch.equal(x.grad, torch.ones(SHAPE))


def test_empty_tensors(group):
    for region in DEFINITIONS:
        x = torch.zeros(group.size, 0, requires_grad=True)
        region(x, group.comm, 0).sum().backward()
        assert x.grad.shape == x.shape


def test_a_checked_group_compares_requires_grad(mpi_world):
    with commengine.Communicator(mpi_world, device="cpu", checked=True) as comm:
        x = torch.ones(SHAPE, requires_grad=comm.rank == 0)
        for region in (tplayers.gather_from_sequence_parallel_region, tplayers.copy_to_tensor_parallel_region):
            if comm.size == 1:
                assert region(x, comm) is x
                continue
            with pytest.raises(commengine.CollectiveMismatch, match="requires_grad=False"):
                region(x, comm)
