"""Operators that communicate, each with one fault in its derivatives that people have made."""

import time

import torch

from bench.conformance import serial
from bench.conformance.operator import Operator


def pair(forward, backward):
    """The function of an autograd Function: ``backward(cotangent, x)`` is its derivative."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad, *ctx.saved_tensors)

    return Pair.apply


def operators(mpi):
    ranks, rank = mpi.size, mpi.rank
    after, before = (rank + 1) % ranks, (rank - 1) % ranks

    def total(x):
        return torch.from_numpy(sum(mpi.allgather(x.detach().contiguous().numpy())))

    def rows(x):
        return torch.cat([torch.from_numpy(one) for one in mpi.allgather(x.detach().contiguous().numpy())])

    def moved(x, to, source):
        return torch.from_numpy(mpi.sendrecv(x.detach().contiguous().numpy(), to, source=source))

    all_reduce = pair(total, lambda g, x: all_reduce(g))

    def part(g, x, order=1):
        """This rank's rows of the sum. order: -1 takes the sizes of the parts in the reverse order."""
        start = min(sum(mpi.allgather(len(x))[::order][:rank]), len(g) - len(x))  # so many rows are there
        return total(g)[start : start + len(x)]

    def summed_in_place(g, x):
        g.copy_(total(g))
        return g.clone()

    def only_contiguous(g, x):
        done = total(g)
        return done if all(mpi.allgather(g.is_contiguous())) else torch.zeros_like(done)

    def unless_empty(g, x):
        mine = part(g, x)
        return mine if min(mpi.allgather(len(x))) else 2 * mine

    def detached(x):
        return DetachedSum.apply(x)

    class DetachedSum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return total(x)

        @staticmethod
        def backward(ctx, grad):
            return all_reduce(grad.detach())

    def waits(x):
        every = mpi.allgather(x.requires_grad)
        while not all(every):
            time.sleep(1)
        return all_reduce(x)

    return [
        Operator("no reduce", pair(total, lambda g, x: g.clone()), serial.all_reduce),
        Operator("factor of size", pair(total, lambda g, x: total(g) / ranks), serial.all_reduce),
        Operator(
            "wrong neighbour",
            pair(lambda x: moved(x, after, before), lambda g, x: moved(g, after, before)), serial.neighbours(1),
        ),
        Operator(
            "wrong order of uneven parts", pair(rows, lambda g, x: part(g, x, -1)), serial.all_gather, rows="own"
        ),
        Operator("in place", pair(total, summed_in_place), serial.all_reduce),
        Operator("only contiguous", pair(total, only_contiguous), serial.all_reduce),
        Operator("wrong without rows", pair(rows, unless_empty), serial.all_gather, rows="own"),
        Operator("second is detached", detached, serial.all_reduce),
        Operator("right if ranks weigh equally", pair(total, lambda g, x: ranks * g), serial.all_reduce),
        Operator("hangs without requires_grad", waits, serial.all_reduce),
    ]  # fmt: skip
