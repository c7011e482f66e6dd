"""The transports in the rank's own process, and the interface of all transports.

A transport opens once for a group, with buffers for its largest call. `Transport.bind` makes one call ready, and
`Bound.run` times it. The ranks meet before each call, outside of the measured time: at MPI's barrier, or as
`Transport.meet` says. If a library has an operation in place only, its time out of place includes the copy of the
input, because a caller who needs both tensors has to make that copy.

Buffers are of three kinds (`bench.transports.names.BUFFERS`). "same": the same two, whose values nobody touches between
two calls. "fresh": the same two, and each rank writes its input just before the ranks meet. "new": memory that is
allocated for each call, perhaps where another call had its own, and written then. Neither the writing nor the
allocation is measured.

To add a transport, subclass `LocalTransport` and add the class to LOCAL. The peers run in processes of their own: see
bench/transports/peer_process.py.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.timing.sampling import Times
from bench.timing.starting import spans_nodes
from bench.transports.names import FRESH, NEW, SAME
from bench.transports.operations import OPERATIONS, REDUCING, Buffers, CollectiveCall
from commengine import CollectiveError, Communicator
from commengine.dtypes import MpiTypes
from commengine.mpi import load_mpi
from commengine.operations.uneven.rows import starts_of


class Bound(ABC):
    """A call that is ready to be timed on every rank of its group.

    The calls of one transport share its buffers, so call `reset` before you look at the result of one.
    """

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
    #: the operations that it can run; it refuses the others
    operations: Sequence[str]
    #: every rank of the group calls it before each call that is bound from now on
    meet: Callable[[], object]
    #: the kind of buffers of the calls that are bound from now on
    buffers: str = SAME

    def refuses(self, call: CollectiveCall, in_place: bool) -> str | None:
        """The reason why this transport cannot make the call, or None. The same on every rank."""
        if call.operation == "send" and call.ranks % 2:
            return "a message one way needs an even number of ranks"
        return None if call.operation in self.operations else f"{self.name} does not run {call.operation}"

    @abstractmethod
    def bind(self, call: CollectiveCall, in_place: bool) -> Bound:
        """The call, with its buffers reset. Raises CollectiveError, on every rank, if it turns out to be impossible.

        Raises ValueError in a `LocalTransport` that does not have the operation.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all that was made. No call of this transport may be in use."""


@dataclass
class LocalCall(Bound):
    """A call made in this process.

    start: begins it; on a stream it returns the call's Work. invoke: makes it from beginning to end. meet: lets the
    ranks begin together. before: called before the ranks meet. renew: gives buffers, start and invoke of each call.
    """

    call: CollectiveCall
    rank: int
    in_place: bool
    buffers: Buffers
    start: Callable[[], Any]
    invoke: Callable[..., Any]
    meet: Callable[[], object]
    before: Callable[[], object] | None = None
    renew: Callable[[], tuple[Buffers, Callable[[], Any], Callable[..., Any]]] | None = None

    def __post_init__(self) -> None:
        self.reset()

    @property
    def input(self) -> Tensor:
        """Its input, a view of a buffer."""
        return self.buffers.views(self.call, self.rank, self.in_place)[0]

    def reset(self) -> None:
        self.buffers.reset(self.call, self.rank, self.in_place)
        self._poison = True

    def run(self, count: int) -> tuple[Times, Times]:
        if self.renew is None:
            return timed(self.invoke, count, self.meet, self.before)
        found = []
        for _ in range(count):
            self.buffers, self.start, self.invoke = self.renew()
            if self._poison:  # the result of this call is looked at
                self.reset()
                self._poison = False
            else:
                self.buffers.write(self.call, self.rank, self.in_place)
            found.append(timed(self.invoke, 1, self.meet))
        starts, seconds = zip(*found, strict=True)
        return np.concatenate(starts), np.concatenate(seconds)

    def wrong(self) -> int:
        return self.buffers.wrong(self.call, self.rank)


def timed(
    invoke: Callable[[], object], count: int, meet: Callable[[], object], before: Callable[[], object] | None = None
) -> tuple[Times, Times]:
    """When each of ``count`` calls began, and its seconds. before: called before each meeting."""
    starts, ends = np.empty(count), np.empty(count)
    clock = time.perf_counter
    for index in range(count):
        if before is not None:
            before()
        meet()
        starts[index] = clock()
        invoke()
        ends[index] = clock()
    return starts, ends - starts


class LocalTransport(Transport):
    """A transport whose calls are made in this process, on two buffers.

    rank: of this process. send, recv: uint8 [capacity]. meet: as in `Transport`.
    """

    operations: Sequence[str] = OPERATIONS
    #: those that the library has in place only: out of place their input is copied first
    in_place_only: Collection[str] = ("all_reduce", "reduce", "broadcast")
    #: of the calls that `bind` makes
    bound: type[LocalCall] = LocalCall

    def __init__(self, rank: int, meet: Callable[[], object], send: Tensor, recv: Tensor) -> None:
        self._rank, self.meet = rank, meet
        self._whole = send, recv
        self._buffers = Buffers(send, recv)

    def shift(self, nbytes: int) -> None:
        """Let the calls that are bound from now on use the two buffers from byte ``nbytes`` on."""
        self._buffers = Buffers(*(one[nbytes:] for one in self._whole))

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """The two buffers, uint8 [capacity]: those that calls send from, and receive in."""
        return self._buffers.memory

    def bind(self, call: CollectiveCall, in_place: bool) -> Bound:
        if call.operation not in self.operations:
            raise ValueError(f"{self.name} does not run {call.operation}")
        made = self._made(call, in_place, self._buffers)
        before = partial(self._buffers.write, call, self._rank, in_place) if self.buffers == FRESH else None
        renew = None
        if self.buffers == NEW:
            sizes = [max(view.nbytes, 1) for view in self._buffers.views(call, self._rank, in_place)]
            like = self._buffers.memory[0]
            renew = lambda: self._made(call, in_place, Buffers(*(like.new_empty(size) for size in sizes)))  # noqa: E731
        return self.bound(call, self._rank, in_place, *made, self.meet, before, renew)

    def _made(
        self, call: CollectiveCall, in_place: bool, buffers: Buffers
    ) -> tuple[Buffers, Callable[[], Any], Callable[[], object]]:
        """The buffers, and the call on them: its beginning, and all of it."""
        kept, self._buffers = self._buffers, buffers
        try:
            start = self._start(call, in_place)
        finally:
            self._buffers = kept
        if call.operation in self.in_place_only and not in_place and call.sent(self._rank):
            start = partial(_copy_and, start, *buffers.views(call, self._rank, in_place))
        return buffers, start, self._finished(start)

    def agree(self, clock: dict[str, float]) -> None:
        """Let the calls that are bound from now on begin at agreed times of a `bench.timing.starting.Clock`."""
        raise ValueError(f"{self.name} runs inside a node only")

    @abstractmethod
    def _start(self, call: CollectiveCall, in_place: bool) -> Callable[[], Any]:
        """The beginning of the call: the whole call, if it runs on no stream and no device."""

    def _finished(self, start: Callable[[], Any]) -> Callable[[], object]:
        """The call from beginning to end."""
        return start

    def close(self) -> None:
        del self._buffers, self._whole  # a window is freed with its communicator only if no tensor refers to it


#: why a transport has no new buffers
ONCE = "its memory is shared, and made once"


def _copy_and(start: Callable[[], Any], send: Tensor, recv: Tensor) -> Any:
    recv.copy_(send)
    return start()


class Engine(LocalTransport):
    """The Communicator's operations on private tensors of this process."""

    name = "engine"
    _stream: Any = None

    def __init__(self, group: Communicator, capacity: int) -> None:
        self._group = self._comm = group  # _comm runs the calls
        super().__init__(group.rank, group.mpi.Barrier, self._memory(capacity), self._memory(capacity))

    def _memory(self, capacity: int) -> Tensor:
        return torch.zeros(capacity, dtype=torch.uint8)

    def _start(self, call: CollectiveCall, in_place: bool) -> Callable[[], Any]:
        send, recv = self._buffers.views(call, self._rank, in_place)
        here, root, op = self._rank == call.root, call.root, call.redop
        arguments: dict[str, tuple[Any, ...]] = {
            "all_reduce": (recv, op),
            "reduce_scatter": (recv, send, op),
            "all_gather": (recv, send),
            "broadcast": (recv, root),
            "reduce": (recv, root, op),
            "gather": (recv if here else None, send, root),
            "scatter": (recv, send if here else None, root),
            "all_to_all": (recv, send),
            "sendrecv": (send, (self._rank + 1) % call.ranks, recv, (self._rank - 1) % call.ranks),
            "barrier": (),
            "send": (send, call.partner(self._rank)),
            "recv": (recv, call.partner(self._rank)),
        }
        name = call.called(self._rank)
        if call.operation == "all_to_all_v":
            return partial(self._counted, recv, send, call.to(self._rank))
        if call.operation == "all_gather_v":
            arguments[name] = (recv, send, call.fro(self._rank))
        return partial(getattr(self._comm, name), *arguments[name], stream=self._stream)

    def _counted(self, recv: Tensor, send: Tensor, rows: list[int]) -> Any:
        """An all_to_all_v of ranks that know only what they send: the exchange of the counts is a part of it."""
        if self._stream is None:
            return self._comm.exchange_rows(recv, send, rows)
        counts = self._comm.exchange_counts(rows)
        return self._comm.all_to_all_v(recv, send, counts, rows, stream=self._stream)


class Shared(Engine):
    """The engine on tensors of `Communicator.empty`, which the ranks of a node share. Large ones use no messages."""

    name = "shared"
    #: whether its buffers are windows
    once = True

    def refuses(self, call: CollectiveCall, in_place: bool) -> str | None:
        return ONCE if self.once and self.buffers == NEW else super().refuses(call, in_place)

    def __init__(self, group: Communicator, capacity: int) -> None:
        if group.size == 1 or spans_nodes(group.mpi):
            raise CollectiveError("needs a group of two ranks or more on one node")
        # A communicator of its own: one that has windows must find out for private tensors whose lie in a window.
        super().__init__(Communicator(group.mpi, device="cpu", order=group.order), capacity)

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
        super().__init__(device_comm, capacity)

    def _memory(self, capacity: int) -> Tensor:
        return torch.zeros(capacity, dtype=torch.uint8, device=self._comm.device)

    def _finished(self, start: Callable[[], Any]) -> Callable[[], object]:
        def run() -> None:
            start()
            torch.cuda.synchronize(self._comm.device)

        return run

    def close(self) -> None:
        super().close()
        self._comm.close()


class Nccl(OnDevice):
    """NCCL through the engine."""

    name = "nccl"


class Staged(OnDevice):
    """Device tensors through pinned host memory and MPI, by the engine."""

    name = "staged"


class Mpi4py(LocalTransport):
    """mpi4py's own collectives on the same memory. Out of place makes no copies, but for a broadcast."""

    name = "mpi4py"
    in_place_only = ("broadcast",)

    def __init__(self, group: Communicator, capacity: int) -> None:
        self._mpi = load_mpi()
        self._comm = group.mpi
        self._types = MpiTypes(self._mpi)
        memory = (torch.zeros(capacity, dtype=torch.uint8) for _ in range(2))
        super().__init__(group.rank, group.mpi.Barrier, *memory)

    def refuses(self, call: CollectiveCall, in_place: bool) -> str | None:
        if call.redop == "avg":
            return "MPI has no avg"
        if call.operation in REDUCING and (call.dtype, call.redop) not in self._types.reduce:
            return f"MPI does not reduce {str(call.dtype).removeprefix('torch.')} as torch does"
        return super().refuses(call, in_place)

    def _start(self, call: CollectiveCall, in_place: bool) -> Callable[[], Any]:
        comm, root, here = self._comm, call.root, self._rank == call.root
        following, previous = (self._rank + 1) % call.ranks, (self._rank - 1) % call.ranks
        if call.operation in REDUCING:
            datatype, op = self._types.reduce[call.dtype, call.redop]
        else:
            datatype, op = self._types.move[call.dtype], self._mpi.OP_NULL
        views = self._buffers.views(call, self._rank, in_place)
        source, target = ((self._mpi.memory.fromaddress(one.data_ptr(), one.nbytes), datatype) for one in views)
        given = self._mpi.IN_PLACE if in_place else source
        calls: dict[str, tuple[Any, ...]] = {
            "all_reduce": (comm.Allreduce, given, target, op),
            "reduce_scatter": (comm.Reduce_scatter_block, source, target, op),
            "all_gather": (comm.Allgather, given, target),
            "broadcast": (comm.Bcast, target, root),
            # only the root may say IN_PLACE
            "reduce": (comm.Reduce, given if here else source, target if here else None, op, root),
            "gather": (comm.Gather, source, target if here else None, root),
            "scatter": (comm.Scatter, source if here else None, target, root),
            "all_to_all": (comm.Alltoall, given, target),
            "sendrecv": (comm.Sendrecv, source, following, 0, target, previous, 0),
            "barrier": (comm.Barrier,),
            "send": (comm.Send, source, call.partner(self._rank)),
            "recv": (comm.Recv, target, call.partner(self._rank)),
        }
        if call.operation == "all_to_all_v":
            return partial(self._counted, *source, target[0], call.to(self._rank))
        if call.operation == "all_gather_v":
            rows = call.fro(self._rank)
            calls[call.operation] = (comm.Allgatherv, source, (target[0], rows, starts_of(rows), datatype))
        method, *arguments = calls[call.called(self._rank)]
        return partial(method, *arguments)

    def _counted(self, source: Any, datatype: Any, target: Any, rows: list[int]) -> None:
        """As the engine's: the counts first."""
        sent = np.array(rows, dtype=np.int64)
        received = np.empty_like(sent)
        self._comm.Alltoall(sent, received)
        counts = received.tolist()
        self._comm.Alltoallv((source, rows, starts_of(rows), datatype), (target, counts, starts_of(counts), datatype))


#: the transports of this module, by their names in --transports
LOCAL: dict[str, Callable[[Communicator, int], LocalTransport]] = {
    made.name: made for made in (Engine, Mpi4py, Shared, Streamed, Nccl, Staged)
}
