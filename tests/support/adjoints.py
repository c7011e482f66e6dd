"""Checks that a linear operator over several ranks has the backward that it should: the transposed operator."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tplayers import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region


def random(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), dtype=dtype, generator=generator)


def dot(a, b, comm):
    """The inner product over all ranks."""
    total = torch.vdot(b.reshape(-1), a.reshape(-1)).to(torch.complex128)
    parts = torch.empty(comm.size, 2, dtype=torch.float64)
    comm.all_gather(parts.view(-1), torch.view_as_real(total).clone())
    return complex(*parts.sum(0).tolist())


def assert_dot_product(operator, x, comm, tolerance=1e-13):
    """<F x, y> = <x, F* y> over all ranks, with F* as autograd computes it; ``y`` is random. Returns F x.

    x: None on a rank that has no input.
    """
    leaf = None if x is None else x.detach().clone().requires_grad_()
    out = operator(leaf)
    y = random(out.shape, out.dtype, 1000 + comm.rank)
    assert out.requires_grad
    torch.autograd.backward(out, y)
    here = torch.zeros(0, dtype=out.dtype)
    if leaf is not None:
        here, back = leaf.detach(), leaf.grad
        assert back.shape == leaf.shape and back.dtype == leaf.dtype
        assert torch.equal(here, x)  # the input is not changed
    left, right = dot(out.detach(), y, comm), dot(here, back if leaf is not None else here, comm)
    scale = (dot(out.detach(), out.detach(), comm).real * dot(y, y, comm).real) ** 0.5
    assert abs(left - right) <= tolerance * max(scale, 1e-300), (left, right)
    return out.detach()


def assert_gradients(operator, shape, comm, dtype=torch.float64, *, fast=True, has_input=True):
    """Gradcheck of the operator on the whole: from the blocks of all ranks to the blocks of all ranks.

    The ranks have one global vector each, with equal values, and take their blocks from it; the regions f and g have
    the gradients of that (tests/tplayers/test_regions.py). has_input: False on a rank that has no input. It gives the
    operator an empty tensor, because gradcheck runs only the part of a graph that leads to its input.
    """
    sizes = sizes_of(shape if has_input else (0,), comm)
    x = random((sum(sizes),), dtype, 3).requires_grad_()
    outs = sizes_of(operator(torch.zeros(tuple(shape) if has_input else (0,), dtype=dtype)).shape, comm)

    def whole(x: Tensor) -> Tensor:
        mine = torch.split(copy_to_tensor_parallel_region(x, comm), sizes)[comm.rank]
        around = [torch.zeros(size, dtype=dtype) for size in outs]
        around[comm.rank] = operator(mine.reshape(tuple(shape) if has_input else (0,))).reshape(-1)
        return reduce_from_tensor_parallel_region(torch.cat(around), comm)

    assert torch.autograd.gradcheck(whole, (x,), fast_mode=fast)


def assert_differentiates_twice(operator, shape, comm, dtype=torch.float64):
    """F is linear in x, so differentiating <y, F x> by x, and the result by y, gives F again."""
    x = random(shape, dtype, comm.rank).requires_grad_()
    out = operator(x)
    y = random(out.shape, dtype, 50 + comm.rank).requires_grad_()
    (back,) = torch.autograd.grad(out, x, y, create_graph=True)
    z = random(shape, dtype, 99 + comm.rank)
    (again,) = torch.autograd.grad(back, y, z)
    torch.testing.assert_close(again, operator(z), rtol=1e-13, atol=1e-13)


def assert_forward_mode(operator, shape, comm, dtype=torch.float64):
    """F is linear, so the tangent of F x is F of the tangent; and it differentiates by the tangent."""
    x, tangent = random(shape, dtype, comm.rank), random(shape, dtype, 70 + comm.rank).requires_grad_()
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(operator(forward_ad.make_dual(x, tangent)))
    torch.testing.assert_close(out.primal, operator(x), rtol=0, atol=0)
    torch.testing.assert_close(out.tangent, operator(tangent.detach()), rtol=0, atol=0)
    y = random(out.tangent.shape, dtype, 80 + comm.rank)
    leaf = tangent.detach().clone().requires_grad_()
    for result, by in ((out.tangent, tangent), (operator(leaf), leaf)):
        torch.autograd.backward(result, y)
        assert by.grad is not None
    torch.testing.assert_close(tangent.grad, leaf.grad, rtol=0, atol=0)


def sizes_of(shape, comm):
    """The number of elements of every rank's tensor."""
    sizes = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(sizes, torch.tensor([torch.Size(shape).numel()]))
    return sizes.tolist()
