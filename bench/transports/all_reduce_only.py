"""The transports that bench.all_reduce adds: two ways to sum bfloat16 by MPI, and a pass over memory as the bound."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.timing.sampling import Times
from bench.transports.in_process import Bound, Engine, Mpi4py, Shared, Transport, timed
from bench.transports.operations import CollectiveCall
from bench.transports.peer_process import PeerTransport
from commengine import CollectiveError, Communicator

MPIX_BFLOAT16 = 0x4C00024C  # of MPICH 5's mpi.h; mpi4py has no name for it


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
        return None if call.dtype is torch.bfloat16 else "is for bfloat16"


class InFloat32(Mpi4py):
    """A bfloat16 tensor, copied to fp32, reduced, and copied back. It rounds once."""

    name = "in-fp32"

    def __init__(self, group: Communicator, capacity: int) -> None:
        super().__init__(group, capacity)
        self._wide = torch.zeros(capacity // 2)

    def refuses(self, call: CollectiveCall, in_place: bool) -> str | None:
        return None if call.dtype is torch.bfloat16 else "is for bfloat16"

    def _invocation(self, call: CollectiveCall, in_place: bool) -> Callable[[], object]:
        tensor = self._buffers.views(call, self._comm.rank, in_place)[1]
        wide = self._wide[: call.count]
        buffer = (self._mpi.memory.fromaddress(wide.data_ptr(), wide.nbytes), self._mpi.FLOAT)

        def run() -> None:
            wide.copy_(tensor)
            self._comm.Allreduce(self._mpi.IN_PLACE, buffer, self._mpi.SUM)
            tensor.copy_(wide)

        return run


class Memory(Shared):
    """No collective: every rank reads and writes its own window once, whatever the call's dtype is."""

    name = "memory"

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
    makers = (Shared, Engine, Mpi4py, Extension, InFloat32, gloo, Memory)
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
    return opened, missing
