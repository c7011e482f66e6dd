"""The operators of tplayers that communicate, for ``python -m bench.conformance adjoints tplayers``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tplayers
from bench.conformance import serial
from bench.conformance.operator import Operator
from commengine import CartesianGrid, Communicator, Decomposition

WIDTH = 1  # of halos


def operators(mpi: Any) -> list[Operator]:
    """All of them, on a communicator of mpi4py. Collective."""
    comm, checked = Communicator(mpi, device="cpu"), Communicator(mpi, device="cpu", checked=True)
    return [*movements(comm), *on_blocks(checked), *regions(checked)]


def movements(comm: Communicator) -> list[Operator]:
    """Those that take a communicator."""

    def rows_to_each(x: Tensor) -> Tensor:
        rows = [len(part) for part in serial.parts(x, comm.size)]
        return tplayers.all_to_all_v(x, comm, rows)[0]

    def of(function: Callable[..., Tensor], definition: serial.Serial, **more: Any) -> Operator:
        return Operator(function.__name__, partial(function, comm=comm), definition, **more)

    return [
        of(tplayers.broadcast, serial.broadcast, root=0),
        of(tplayers.sum_reduce, serial.reduce),
        of(tplayers.all_reduce, serial.all_reduce),
        of(tplayers.all_gather, serial.all_gather, rows="own"),
        of(tplayers.reduce_scatter, serial.reduce_scatter, rows="parts"),
        of(tplayers.gather, serial.gather, rows="own"),
        of(tplayers.scatter, serial.scatter, rows="parts", root=0),
        Operator("all_to_all", lambda x: tplayers.all_to_all(need(x), comm, 0, 1), across, rows="parts"),
        Operator("all_to_all_v", lambda x: rows_to_each(need(x)), serial.all_to_all, rows="own"),
    ]


def on_blocks(comm: Communicator) -> list[Operator]:
    """Those that take a grid: of the first axis, which does not wrap around.

    comm: checked, because these operators compare ``requires_grad`` of the ranks at their first call only, or never.
    """
    grid = CartesianGrid(comm, (comm.size, 1))

    def blocks(x: Tensor) -> Decomposition:
        return Decomposition((tuple(comm.mpi.allgather(x.shape[0])), (x.shape[1],)))

    def of(name: str, function: Callable[..., Tensor], definition: serial.Serial, **more: Any) -> Operator:
        return Operator(name, lambda x: function(need(x), blocks(need(x))), definition, **more)

    def halo_and_back(x: Tensor, whole: Decomposition) -> Tensor:
        wide = tplayers.halo_exchange(x, grid, (WIDTH, 0), decomposition=whole)
        return tplayers.halo_accumulate(wide, grid, (WIDTH, 0), decomposition=whole)

    def moved(x: Tensor, whole: Decomposition) -> Tensor:
        even = Decomposition.even(whole.shape, grid.shape)
        return tplayers.repartition(x, comm, whole, even)

    def planned(x: Tensor, whole: Decomposition, *, started: bool = False) -> Tensor:
        plan = tplayers.plan_halo(grid, whole, (WIDTH, 0))
        if started:
            return tplayers.start_transfer(x, plan, comm, stream).wait()
        return tplayers.transfer(x, plan, comm)

    stream = comm.new_stream()
    return [
        of("shift", lambda x, whole: tplayers.shift(x, grid, 0), shifted),
        of("roll", lambda x, whole: tplayers.roll(x, grid, 1, 0, decomposition=whole), rolled, rows="own"),
        of("flip", lambda x, whole: tplayers.flip(x, grid, 0, decomposition=whole), flipped, rows="own"),
        of("halo_exchange", lambda x, whole: tplayers.halo_exchange(x, grid, (WIDTH, 0), decomposition=whole),
           with_halo, rows="own"),
        of("halo_accumulate", halo_and_back, halo_added, rows="own"),
        of("repartition", moved, evened, rows="own"),
        of("transfer", planned, with_halo, rows="own"),
        of("start_transfer", partial(planned, started=True), with_halo, rows="own"),
    ]  # fmt: skip


def regions(comm: Communicator) -> list[Operator]:
    """Those of tensor-parallel layers, where ranks hold one tensor together. comm: checked, as for `on_blocks`."""

    def of(function: Callable[..., Tensor], definition: serial.Serial, **more: Any) -> Operator:
        along = {"dim": 0} if "dim" in function.__code__.co_varnames else {}
        return Operator(function.__name__, lambda x: function(need(x), comm, **along), definition, **more)

    return [
        of(tplayers.copy_to_tensor_parallel_region, serial.same, shared_input=True),
        of(tplayers.reduce_from_tensor_parallel_region, serial.all_reduce, shared_output=True),
        of(tplayers.scatter_to_tensor_parallel_region, serial.scatter_own, rows="multiple", shared_input=True),
        of(tplayers.gather_from_tensor_parallel_region, serial.all_gather, shared_output=True),
        of(tplayers.gather_from_sequence_parallel_region, serial.all_gather),
        of(tplayers.reduce_scatter_to_sequence_parallel_region, serial.reduce_scatter, rows="multiple"),
    ]


def need(x: Tensor | None) -> Tensor:
    """``x``, which only ranks of operators with a root lack."""
    assert x is not None
    return x


def across(xs: Sequence[Tensor]) -> list[Tensor]:
    """Parts of the rows, beside each other."""
    return [torch.cat([serial.parts(x, len(xs))[rank] for x in xs], 1) for rank in range(len(xs))]


def cut(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Blocks of a field, with as many rows as those of ``like``."""
    return list(torch.split(whole, [len(x) for x in like]))


def shifted(xs: Sequence[Tensor]) -> list[Tensor]:
    """The block of the rank before, and zeros on the first rank."""
    return [torch.zeros_like(xs[0]), *xs[:-1]]


def rolled(xs: Sequence[Tensor]) -> list[Tensor]:
    """The field, moved by one row."""
    return cut(torch.roll(torch.cat(list(xs)), 1, 0), xs)


def flipped(xs: Sequence[Tensor]) -> list[Tensor]:
    """The field in reverse order."""
    return cut(torch.flip(torch.cat(list(xs)), [0]), xs)


def evened(xs: Sequence[Tensor]) -> list[Tensor]:
    """The field in blocks as equal as possible."""
    return serial.parts(torch.cat(list(xs)), len(xs))


def with_halo(xs: Sequence[Tensor]) -> list[Tensor]:
    """Each block between a row of its neighbours, zeros at the ends of the field."""
    edge = xs[0].new_zeros(WIDTH, xs[0].shape[1])
    field = torch.cat([edge, *xs, edge])
    starts = [sum(len(x) for x in xs[:rank]) for rank in range(len(xs))]
    return [field[at : at + len(x) + 2 * WIDTH] for at, x in zip(starts, xs, strict=True)]


def halo_added(xs: Sequence[Tensor]) -> list[Tensor]:
    """A row counts once for each block that it is in with its halo."""
    total = torch.zeros_like(torch.cat(list(xs)))
    starts = [sum(len(x) for x in xs[:rank]) for rank in range(len(xs))]
    for at, wide in zip(starts, with_halo(xs), strict=True):
        low, high = max(0, at - WIDTH), min(len(total), at + len(wide) - WIDTH)
        skip = low - (at - WIDTH)
        total = total + torch.nn.functional.pad(wide[skip : skip + high - low], (0, 0, low, len(total) - high))
    return cut(total, xs)
