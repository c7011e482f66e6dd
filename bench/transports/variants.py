"""Transports that answer one question each.

One runs a call while an all-reduce runs beside it, as the messages of a pipeline do. One has prepared its messages. Two
sum bfloat16 by MPI, which has none. One is the engine on private tensors of a group that has windows. One is no
collective but the bound of an all-reduce: in an all-reduce of n bytes among p ranks at least p n bytes are read, the
operand of every rank, and p n bytes are written, the result of every rank. The bound is therefore the time in which the
same ranks, all at once, read and write as many bytes in place: x <- 1 x, STREAM's scale with one array, because a
second array would cost another read. It is the bandwidth of the caches or the memory that hold so many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.timing.sampling import Times
from bench.transports.in_process import LOCAL, Bound, Engine, LocalCall, Mpi4py, Shared, Transport
from bench.transports.names import SAME
from bench.transports.operations import Buffers, CollectiveCall
from commengine import CollectiveError, Communicator, Work

MPIX_BFLOAT16 = 0x4C00024C  # of MPICH 5's mpi.h; mpi4py has no name for it


class Bfloat16Sums(Mpi4py):
    """A way to sum bfloat16 by MPI."""

    def refuses(self, call: CollectiveCall, in_place: bool) -> str | None:
        fits = call.dtype is torch.bfloat16 and call.operation in ("all_reduce", "reduce_scatter")
        return None if fits else "sums bfloat16 only"


class Extension(Bfloat16Sums):
    """MPICH's own bfloat16, which rounds at every step."""

    name = "mpix-bfloat16"

    def __init__(self, group: Communicator, capacity: int) -> None:
        super().__init__(group, capacity)
        vendor, version = self._mpi.get_vendor()
        if vendor != "MPICH" or version[0] != 5:
            raise CollectiveError(f"known of MPICH 5 only, not of {vendor} {version[0]}")
        self._types.reduce[torch.bfloat16, "sum"] = self._mpi.Datatype.fromhandle(MPIX_BFLOAT16), self._mpi.SUM


class InFloat32(Bfloat16Sums):
    """A bfloat16 tensor, copied to fp32, reduced, and copied back. It rounds once."""

    name = "in-fp32"

    def __init__(self, group: Communicator, capacity: int) -> None:
        super().__init__(group, capacity)
        self._wide, self._part = torch.zeros(capacity // 2), torch.zeros(capacity // 2)

    def _start(self, call: CollectiveCall, in_place: bool) -> Callable[[], Any]:
        given, tensor = self._buffers.views(call, self._rank, in_place)
        wide, part = self._wide[: call.whole], self._part[: call.count]
        whole, result = (
            (self._mpi.memory.fromaddress(one.data_ptr(), one.nbytes), self._mpi.FLOAT) for one in (wide, part)
        )
        scattered = call.operation == "reduce_scatter"

        def reduce() -> None:
            wide.copy_(given)
            if scattered:
                self._comm.Reduce_scatter_block(whole, result, self._mpi.SUM)
            else:
                self._comm.Allreduce(self._mpi.IN_PLACE, whole, self._mpi.SUM)
            tensor.copy_(part if scattered else wide)

        return reduce


class BesideWindows(Shared):
    """The engine on private tensors, in a group that has a window too.

    It compares the calls of the ranks before a collective that other ranks might have begun in the window.
    """

    name = "beside-windows"
    once = False

    def _memory(self, capacity: int) -> torch.Tensor:
        if not self._group._shared.segments:
            self._group.empty((1,))
        return torch.zeros(capacity, dtype=torch.uint8)


class Prepared(Engine):
    """The engine's messages as an exchange that was prepared before."""

    name = "prepared"
    operations = ("send", "sendrecv")

    def _start(self, call: CollectiveCall, in_place: bool) -> Callable[[], Any]:
        send, recv = self._buffers.views(call, self._rank, in_place)
        if call.operation == "sendrecv":
            to, fro = (self._rank + 1) % call.ranks, (self._rank - 1) % call.ranks
            return self._comm.exchange([(send, to)], [(recv, fro)]).start
        partner = call.partner(self._rank)
        sends = call.called(self._rank) == "send"
        return self._comm.exchange([(send, partner)] * sends, [(recv, partner)] * (not sends)).start


class Beside(LocalCall):
    """A call during which another one runs. over: waits for the other one, outside of the measured time."""

    over: Callable[[], object]

    def run(self, count: int) -> tuple[Times, Times]:
        found = super().run(count)
        self.over()
        return found


class UnderAllReduce(Engine):
    """The engine, while an all-reduce of as many bytes runs on a stream, or of LEAST bytes if these are more."""

    name = "under-all-reduce"
    bound = Beside
    LEAST = 4 << 20

    def __init__(self, group: Communicator, capacity: int) -> None:
        super().__init__(group, capacity)
        self._beside = group.new_stream()
        self._reduced = torch.zeros(max(capacity, self.LEAST) // 4)
        self._running: Work | None = None

    def bind(self, call: CollectiveCall, in_place: bool) -> Bound:
        bound = super().bind(call, in_place)
        assert isinstance(bound, Beside)
        reduced, meet = self._reduced[: max(call.nbytes, self.LEAST) // 4], self.meet

        def begin() -> None:
            self._finish()
            meet()
            self._running = self._group.all_reduce(reduced, stream=self._beside)

        bound.meet, bound.over = begin, self._finish
        return bound

    def _finish(self) -> None:
        if self._running is not None:
            self._running.wait()
            self._running = None

    def close(self) -> None:
        self._finish()
        super().close()


class Pass(LocalCall):
    """One pass over the call's output, in place."""

    @property
    def _values(self) -> torch.Tensor:
        return self.buffers.views(self.call, self.rank, self.in_place)[1].view(torch.float32)

    def reset(self) -> None:
        self._values.fill_(1.0)

    def wrong(self) -> int:
        return int(torch.count_nonzero(self._values != 1.0))


class Memory(Shared):
    """No collective: every rank reads and writes its own window once, whatever the call's dtype is."""

    name = "memory"
    in_place_only = ()
    bound = Pass

    def refuses(self, call: CollectiveCall, in_place: bool) -> str | None:
        if self.buffers != SAME:
            return "writes its buffer itself"
        if call.operation != "all_reduce" or call.nbytes % 4:
            return "is the bound of an all-reduce of whole fp32 numbers"
        return None

    def _start(self, call: CollectiveCall, in_place: bool) -> Callable[[], Any]:
        view = self._buffers.views(call, self._rank, in_place)[1].view(torch.float32)
        return partial(view.mul_, 1.0)


#: all transports in the rank's own process, by name
TRANSPORTS: dict[str, Callable[[Communicator, int], Transport]] = {
    **LOCAL,
    **{made.name: made for made in (BesideWindows, Extension, InFloat32, Memory, Prepared, UnderAllReduce)},
}


def share_memory(transports: Sequence[Transport], capacity: int) -> None:
    """Let all transports of private tensors in this process use the same memory.

    The pages of a buffer lie where the system has put them. Two buffers of some megabytes collide differently in the
    caches, and one call of MPI takes up to 1.4 times as long in one of them as in the other.
    """
    private = Buffers(torch.zeros(capacity, dtype=torch.uint8), torch.zeros(capacity, dtype=torch.uint8))
    for transport in transports:
        if isinstance(transport, (Mpi4py, BesideWindows, Prepared)) or type(transport) is Engine:
            transport._buffers = private
