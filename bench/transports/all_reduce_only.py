"""The transports that bench.all_reduce adds.

Two ways to sum bfloat16 by MPI, private tensors of a group that has windows, and a pass over memory as the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bench.timing.sampling import Times
from bench.transports.in_process import Bound, Engine, Mpi4py, Shared, Transport, timed
from bench.transports.operations import Buffers, CollectiveCall
from bench.transports.peer_process import PeerTransport
from commengine import CollectiveError, Communicator

MPIX_BFLOAT16 = 0x4C00024C  # of MPICH 5's mpi.h; mpi4py has no name for it


SUMMING = ("all_reduce", "reduce_scatter")


class Extension(Mpi4py):
    """MPICH's own bfloat16, which rounds at every step."""

    name = "mpix-bfloat16"

    def __init__(self, group: Communicator, capacity: int) -> None:
        super().__init__(group, capacity)
        vendor, version = self._mpi.get_vendor()
        if vendor != "MPICH" or version[0] != 5:
            raise CollectiveError(f"known of MPICH 5 only, not of {vendor} {version[0]}")
        datatype = self._mpi.Datatype.fromhandle(MPIX_BFLOAT16)
        if datatype.Get_name() != "MPIX_BFLOAT16":
            raise CollectiveError(f"this MPICH has {datatype.Get_name()!r} where MPIX_BFLOAT16 was expected")
        self._types.reduce[torch.bfloat16, "sum"] = datatype, self._mpi.SUM

    def refuses(self, call: CollectiveCall, in_place: bool) -> str | None:
        return None if call.dtype is torch.bfloat16 and call.operation in SUMMING else "sums bfloat16 only"


class InFloat32(Mpi4py):
    """A bfloat16 tensor, copied to fp32, reduced, and copied back. It rounds once."""

    name = "in-fp32"

    def __init__(self, group: Communicator, capacity: int) -> None:
        super().__init__(group, capacity)
        self._wide, self._part = torch.zeros(capacity // 2), torch.zeros(capacity // 2)

    def refuses(self, call: CollectiveCall, in_place: bool) -> str | None:
        return None if call.dtype is torch.bfloat16 and call.operation in SUMMING else "sums bfloat16 only"

    def _invocation(self, call: CollectiveCall, in_place: bool) -> Callable[[], object]:
        given, tensor = self._buffers.views(call, self._comm.rank, in_place)
        wide, part = self._wide[: call.whole], self._part[: call.count]
        whole, result = (
            (self._mpi.memory.fromaddress(one.data_ptr(), one.nbytes), self._mpi.FLOAT) for one in (wide, part)
        )

        def all_reduce() -> None:
            wide.copy_(given)
            self._comm.Allreduce(self._mpi.IN_PLACE, whole, self._mpi.SUM)
            tensor.copy_(wide)

        def reduce_scatter() -> None:
            wide.copy_(given)
            self._comm.Reduce_scatter_block(whole, result, self._mpi.SUM)
            tensor.copy_(part)

        return all_reduce if call.operation == "all_reduce" else reduce_scatter


class BesideWindows(Shared):
    """The engine on private tensors, in a group that has a window too.

    It compares the calls of the ranks before a collective that other ranks might have begun in the window.
    """

    name = "beside-windows"

    def _memory(self, capacity: int) -> torch.Tensor:
        if not self._group._shared.segments:
            self._group.empty((1,))
        return torch.zeros(capacity, dtype=torch.uint8)


class Memory(Shared):
    """No collective: every rank reads and writes its own window once, whatever the call's dtype is."""

    name = "memory"

    def refuses(self, call: CollectiveCall, in_place: bool) -> str | None:
        if call.operation != "all_reduce" or call.nbytes % 4:
            return "is the bound of an all-reduce of whole fp32 numbers"
        return None

    def bind(self, call: CollectiveCall, in_place: bool) -> Bound:
        view = self._buffers.views(call, self._comm.rank, in_place)[1].view(torch.float32)
        return Pass(view, self._meet())


class Pass(Bound):
    """One pass over a tensor, in place."""

    def __init__(self, tensor: torch.Tensor, meet: Callable[[], object]) -> None:
        self._tensor, self._meet = tensor, meet
        self.reset()

    def reset(self) -> None:
        self._tensor.fill_(1.0)

    def run(self, count: int) -> tuple[Times, Times]:
        return timed(lambda: self._tensor.mul_(1.0), count, self._meet)

    def wrong(self) -> int:
        return int(torch.count_nonzero(self._tensor != 1.0))


def open_transports(group: Communicator, capacity: int) -> tuple[list[Transport], list[str]]:
    """Open all transports of bench.all_reduce that work on every rank here.

    Returns also why the others do not. Collective.
    """
    opened: list[Transport] = []
    missing = []

    def gloo(group: Communicator, capacity: int) -> Transport:
        return PeerTransport("gloo", group, capacity)

    makers: tuple[Callable[[Communicator, int], Transport], ...]
    makers = (Shared, Engine, BesideWindows, Mpi4py, Extension, InFloat32, gloo, Memory)
    for make in makers:
        problem, made = "", None
        try:
            made = make(group, capacity)
        except CollectiveError as error:
            problem = str(error)
        problems = [text for text in group.mpi.allgather(problem) if text]
        if made is not None and not problems:
            opened.append(made)
        else:
            if made is not None:
                made.close()
            missing.append(f"{getattr(make, 'name', 'gloo')} {problems[0]}")
    share_memory(opened, capacity)
    return opened, missing


def share_memory(transports: Sequence[Transport], capacity: int) -> None:
    """Let all transports of private tensors in this process use the same memory.

    The pages of a buffer lie where the system has put them. Two buffers of some megabytes collide differently in the
    caches, and one call of MPI takes up to 1.4 times as long in one of them as in the other.
    """
    private = Buffers(torch.zeros(capacity, dtype=torch.uint8), torch.zeros(capacity, dtype=torch.uint8))
    for transport in transports:
        if isinstance(transport, (Mpi4py, BesideWindows)) or type(transport) is Engine:
            transport._buffers = private
