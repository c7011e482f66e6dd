"""Checks that a linear operator over several ranks has the backward that it should: the transposed operator."""

import torch
from torch import Tensor

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
    """<F x, y> = <x, F* y> over all ranks, with F* as autograd computes it; ``y`` is random. Returns F x."""
    x = x.detach().requires_grad_()
    out = operator(x)
    y = random(out.shape, out.dtype, 1000 + comm.rank)
    assert out.requires_grad
    (back,) = torch.autograd.grad(out, x, y)
    assert back.shape == x.shape and back.dtype == x.dtype
    left, right = dot(out.detach(), y, comm), dot(x.detach(), back, comm)
    scale = (dot(out.detach(), out.detach(), comm).real * dot(y, y, comm).real) ** 0.5
    assert abs(left - right) <= tolerance * max(scale, 1e-300), (left, right)
    return out.detach()


def assert_gradients(operator, shape, comm, dtype=torch.float64, fast=True):
    """Gradcheck of the operator on the whole: from the blocks of all ranks to the blocks of all ranks.

    The ranks have one global vector each, with equal values, and take their blocks from it; the regions f and g have
    the gradients of that (tests/tplayers/test_regions.py).
    """
    sizes = sizes_of(shape, comm)
    x = random((sum(sizes),), dtype, 3).requires_grad_()
    outs = sizes_of(operator(torch.zeros(tuple(shape), dtype=dtype)).shape, comm)

    def whole(x: Tensor) -> Tensor:
        mine = torch.split(copy_to_tensor_parallel_region(x, comm), sizes)[comm.rank]
        out = operator(mine.reshape(tuple(shape))).reshape(-1)
        around = [torch.zeros(size, dtype=dtype) for size in outs]
        around[comm.rank] = out
        return reduce_from_tensor_parallel_region(torch.cat(around), comm)

    assert torch.autograd.gradcheck(whole, (x,), fast_mode=fast)
    # f and g cannot be differentiated twice, so the second derivative is checked without them: F is linear, so
    # differentiating <y, F x> by y gives F x again.
    x = random(shape, dtype, comm.rank).requires_grad_()
    out = operator(x)
    y = random(out.shape, dtype, 50 + comm.rank).requires_grad_()
    (back,) = torch.autograd.grad(out, x, y, create_graph=True)
    z = random(shape, dtype, 99 + comm.rank)
    (again,) = torch.autograd.grad(back, y, z)
    torch.testing.assert_close(again, operator(z), rtol=1e-13, atol=1e-13)


def sizes_of(shape, comm):
    """The number of elements of every rank's tensor."""
    sizes = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(sizes, torch.tensor([torch.Size(shape).numel()]))
    return sizes.tolist()
