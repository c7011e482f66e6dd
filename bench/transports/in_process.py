"""The transports in the rank's own process, and the interface of all transports.

A transport opens once for a group, with buffers for its largest call. `Transport.bind` makes one call ready, and
`Bound.run` times it. The ranks meet before each call, outside of the measured time: at MPI's barrier, or as
`Transport.meet` says. If a library has an operation in place only, its time out of place includes the copy of the
input, because a caller who needs both tensors has to make that copy.

To add a transport, subclass `Transport` and add the class to LOCAL. bench/transports/peer_process.py has the peers,
which run in processes of their own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.timing.sampling import Times
from bench.transports.operations import REDUCING, Buffers, CollectiveCall
from commengine import CollectiveError, Communicator
from commengine.dtypes import MpiTypes


class Bound(ABC):
    """A call that is ready to be timed on every rank of its group.

    The calls of one transport share its buffers, so call `reset` before you look at the result of one.
    """

    #: enqueues the call and returns its Work; None if the transport has no stream
    start: Callable[[], Any] | None = None

    @abstractmethod
    def reset(self) -> None:
        """Poison the buffers and write the input."""

    @abstractmethod
    def run(self, count: int) -> tuple[Times, Times]:
        """See `bench.timing.sampling.Timed`."""

    @abstractmethod
    def wrong(self) -> int:
        """The number of wrong elements in this rank's output."""


class Transport(ABC):
    """One way to run collectives on the tensors of a group. Making it, `bind` and `close` are collective."""

    name: str
    #: the operations that it can run, written out: what it does not list, it refuses
    operations: Sequence[str]
    #: every rank of the group calls it before each call that is bound from now on
    meet: Callable[[], object]

    def refuses(self, call: CollectiveCall, in_place: bool) -> str | None:
        """The reason why this transport cannot make the call, or None. The same on every rank."""
        return None if call.operation in self.operations else f"{self.name} does not run {call.operation}"

    @abstractmethod
    def bind(self, call: CollectiveCall, in_place: bool) -> Bound:
        """The call, with its buffers reset. Raises CollectiveError, on every rank, if it turns out to be impossible.

        Raises ValueError in a transport of LOCAL if the transport does not have the operation.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all that was made. No call of this transport may be in use."""


class LocalCall(Bound):
    """A call made in this process. invoke: makes it from beginning to end. meet: lets the ranks begin together."""

    def __init__(
        self,
        call: CollectiveCall,
        rank: int,
        in_place: bool,
        buffers: Buffers,
        invoke: Callable[[], object],
        meet: Callable[[], object],
    ) -> None:
        self._call, self._rank, self._in_place, self._buffers = call, rank, in_place, buffers
        self._invoke, self._meet = invoke, meet
        self.reset()

    def reset(self) -> None:
        self._buffers.reset(self._call, self._rank, self._in_place)

    def run(self, count: int) -> tuple[Times, Times]:
        return timed(self._invoke, count, self._meet)

    def wrong(self) -> int:
        return self._buffers.wrong(self._call, self._rank)


def timed(invoke: Callable[[], object], count: int, meet: Callable[[], object]) -> tuple[Times, Times]:
    """When each of ``count`` calls began, and its seconds."""
    starts, ends = np.empty(count), np.empty(count)
    clock = time.perf_counter
    for index in range(count):
        meet()
        starts[index] = clock()
        invoke()
        ends[index] = clock()
    return starts, ends - starts


class Engine(Transport):
    """The Communicator's operations on private tensors of this process."""

    name = "engine"
    operations = (
        "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all",
        "sendrecv", "barrier",
    )  # fmt: skip

    def __init__(self, group: Communicator, capacity: int) -> None:
        self._group = group
        self.meet = group.mpi.Barrier
        self._comm = group  # runs the call
        self._buffers = Buffers(self._memory(capacity), self._memory(capacity))
        self._stream: Any = None

    def _memory(self, capacity: int) -> Tensor:
        return torch.zeros(capacity, dtype=torch.uint8)

    def bind(self, call: CollectiveCall, in_place: bool) -> Bound:
        start = self._start(call, in_place)
        bound = LocalCall(call, self._comm.rank, in_place, self._buffers, self._finished(start), self._meet())
        bound.start = start if self._stream is not None else None
        return bound

    def close(self) -> None:
        del self._buffers  # a window is freed with its communicator only if no tensor refers to it

    def _finished(self, start: Callable[[], Any]) -> Callable[[], object]:
        """The call from beginning to end."""
        return start

    def _meet(self) -> Callable[[], object]:
        return self.meet

    def _start(self, call: CollectiveCall, in_place: bool) -> Callable[[], Any]:
        comm, stream = self._comm, self._stream
        send, recv = self._buffers.views(call, comm.rank, in_place)
        name, root = call.operation, call.root
        if name == "barrier":
            return partial(comm.barrier, stream=stream)
        if name in ("all_reduce", "reduce", "broadcast"):
            arguments = {"stream": stream, **({"op": call.redop} if name in REDUCING else {})}
            arguments |= {"root": root} if root >= 0 else {}
            operate = partial(getattr(comm, name), recv, **arguments)
            if in_place or not call.sent(comm.rank):
                return operate

            def copied() -> Any:
                recv.copy_(send)
                return operate()

            return copied
        if name == "reduce_scatter":
            return partial(comm.reduce_scatter, recv, send, call.redop, stream=stream)
        if name in ("gather", "scatter"):
            here = comm.rank == root
            output, input = (recv if here else None, send) if name == "gather" else (recv, send if here else None)
            return partial(getattr(comm, name), output, input, root, stream=stream)
        if name == "sendrecv":
            following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            return partial(comm.sendrecv, send, following, recv, previous, stream=stream)
        if name in ("all_gather", "all_to_all"):
            return partial(getattr(comm, name), recv, send, stream=stream)
        raise ValueError(f"{self.name} does not run {name}")


class Shared(Engine):
    """The engine on tensors of `Communicator.empty`, which the ranks of a node share. Large ones use no messages."""

    name = "shared"

    def __init__(self, group: Communicator, capacity: int) -> None:
        from mpi4py import MPI

        node = group.mpi.Split_type(MPI.COMM_TYPE_SHARED)
        together = group.mpi.allreduce(node.size, MPI.MIN) == group.size > 1
        node.Free()
        if not together:
            raise CollectiveError("needs a group of two ranks or more on one node")
        # A communicator of its own: one that has windows must find out for private tensors whose lie in a window.
        super().__init__(Communicator(group.mpi, device="cpu"), capacity)

    def _memory(self, capacity: int) -> Tensor:
        return self._group.empty((capacity,), torch.uint8).zero_()

    def close(self) -> None:
        super().close()
        self._group.close()


class Streamed(Engine):
    """The engine on a stream, from enqueuing to the end of the wait."""

    name = "stream"

    def __init__(self, group: Communicator, capacity: int) -> None:
        super().__init__(group, capacity)
        self._stream = group.new_stream()

    def _finished(self, start: Callable[[], Any]) -> Callable[[], object]:
        return lambda: start().wait()


class OnDevice(Engine):
    """The engine on tensors of a CUDA device, until the device has finished. It has not run on a GPU yet."""

    def __init__(self, group: Communicator, capacity: int) -> None:
        if not torch.cuda.is_available():
            raise CollectiveError("needs a CUDA device, and torch sees none")
        device_comm = Communicator(group.mpi, device="cuda", transport=self.name, name=group.name)
        device_comm.make_device_current()
        self._device = device_comm.device
        super().__init__(group, capacity)
        self._comm = device_comm

    def _memory(self, capacity: int) -> Tensor:
        return torch.zeros(capacity, dtype=torch.uint8, device=self._device)

    def _finished(self, start: Callable[[], Any]) -> Callable[[], object]:
        def run() -> None:
            start()
            torch.cuda.synchronize(self._device)

        return run

    def _meet(self) -> Callable[[], object]:
        begin = self.meet

        def meet() -> None:
            torch.cuda.synchronize(self._device)
            begin()

        return meet

    def close(self) -> None:
        super().close()
        self._comm.close()


class Nccl(OnDevice):
    """NCCL through the engine."""

    name = "nccl"


class Staged(OnDevice):
    """Device tensors through pinned host memory and MPI, by the engine."""

    name = "staged"


class Mpi4py(Transport):
    """mpi4py's own collectives on the same memory. Out of place makes no copies."""

    name = "mpi4py"
    operations = (
        "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all",
        "sendrecv", "barrier",
    )  # fmt: skip

    def __init__(self, group: Communicator, capacity: int) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = group.mpi
        self.meet = group.mpi.Barrier
        self._types = MpiTypes(MPI)
        self._buffers = Buffers(torch.zeros(capacity, dtype=torch.uint8), torch.zeros(capacity, dtype=torch.uint8))

    def refuses(self, call: CollectiveCall, in_place: bool) -> str | None:
        if call.redop == "avg":
            return "MPI has no avg"
        if call.operation in REDUCING and (call.dtype, call.redop) not in self._types.reduce:
            return f"MPI does not reduce {str(call.dtype).removeprefix('torch.')} as torch does"
        return super().refuses(call, in_place)

    def bind(self, call: CollectiveCall, in_place: bool) -> Bound:
        return LocalCall(call, self._comm.rank, in_place, self._buffers, self._invocation(call, in_place), self.meet)

    def close(self) -> None:
        del self._buffers

    def _invocation(self, call: CollectiveCall, in_place: bool) -> Callable[[], object]:
        comm, name, root = self._comm, call.operation, call.root
        if name == "barrier":
            return comm.Barrier
        here = comm.rank == root
        if name in REDUCING:
            datatype, op = self._types.reduce[call.dtype, call.redop]
        else:
            datatype, op = self._types.move[call.dtype], self._mpi.OP_NULL
        send, recv = self._buffers.views(call, comm.rank, in_place)
        source, target = ((self._mpi.memory.fromaddress(t.data_ptr(), t.nbytes), datatype) for t in (send, recv))
        given = self._mpi.IN_PLACE if in_place else source
        if name == "all_reduce":
            return partial(comm.Allreduce, given, target, op)
        if name == "reduce":
            sent = source if in_place and not here else given  # only the root may say IN_PLACE
            return partial(comm.Reduce, sent, target if here else None, op, root)
        if name == "reduce_scatter":
            return partial(comm.Reduce_scatter_block, source, target, op)
        if name == "broadcast":
            operate = partial(comm.Bcast, target, root)
            if in_place or not here:
                return operate

            def copied() -> None:
                recv.copy_(send)
                operate()

            return copied
        if name == "gather":
            return partial(comm.Gather, source, target if here else None, root)
        if name == "scatter":
            return partial(comm.Scatter, source if here else None, target, root)
        if name == "sendrecv":
            following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            return partial(comm.Sendrecv, source, following, 0, target, previous, 0)
        if name == "all_gather":
            return partial(comm.Allgather, given, target)
        if name == "all_to_all":
            return partial(comm.Alltoall, given, target)
        raise ValueError(f"{self.name} does not run {name}")


#: the transports of this module, by their names in --transports
LOCAL: dict[str, Callable[[Communicator, int], Transport]] = {
    made.name: made for made in (Engine, Mpi4py, Shared, Streamed, Nccl, Staged)
}
