"""Stream, Event and Work: ordered queues of collectives.

A host stream is to the host what a CUDA stream is to a device: the collectives enqueued on it run in order, beside the
caller. `Stream` is the interface of all kinds of streams.
"""

from __future__ import annotations

import atexit
import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeAlias

from .errors import CollectiveError
from .job_end import abort, is_child_of_rank, say
from .mpi import load_mpi

#: a `commengine.trace.CollectiveEvent`
Record: TypeAlias = Any

#: seconds that a program which ends without close() waits for the collectives in its streams
EXIT_SECONDS = 10.0


class Gate:
    """A point in a host stream, which the stream's worker opens. A CUDA event is such a point of a device stream."""

    def __init__(self) -> None:
        self._open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def query(self) -> bool:
        """Whether the gate is open. Never blocks."""
        return self._open

    def synchronize(self) -> None:
        """Block the calling thread until the gate is open."""
        if not self._open:
            if is_child_of_rank():
                raise CollectiveError("this process is a forked child: the worker of the stream is in its parent")
            with self._lock:  # a signal that ends the wait leaves the lock to the other threads
                pass

    def open(self) -> None:
        """Let every waiting thread go on. Called once."""
        self._open = True
        self._lock.release()


class Event:
    """A point in a stream: done when all that was enqueued before it is done. point: a `Gate` or a CUDA event."""

    def __init__(self, point: Any = None, records: Sequence[Record] = (), tensors: tuple[Any, ...] = ()) -> None:
        self._point: Any = Gate() if point is None else point
        self._tensors = tensors
        self._records = records  # the traced collectives that a caller waits for when it waits here
        self._error: BaseException | None = None
        self._told = False
        self._about: object = ""  # what the call is, for a message

    def done(self) -> bool:
        """Whether the point was reached. Never blocks."""
        return bool(self._point.query())

    def wait(self) -> None:
        """Block the calling thread until the point is reached. Raises the stream's failure if it failed before.

        Any thread may call it, also repeatedly; every call then raises that failure.
        """
        waited = [record for record in self._records if record.wait_start is None] if self._records else ()
        for record in waited:
            record.wait_start = time.perf_counter()
        self._reach()
        for record in waited:
            record.wait_end = time.perf_counter()
        self._records = self._tensors = ()
        if self._error is not None:
            self._told = True
            raise self._error

    def _follow(self) -> None:
        """Wait on behalf of another stream: the caller's waiting times and tensors stay as they are."""
        self._reach()
        if self._error is not None:
            raise self._error

    def _reach(self) -> None:
        self._point.synchronize()


class Work(Event):
    """One enqueued operation. It keeps the tensors in flight alive until `wait` returns.

    Each operation of a `Communicator` returns one. It is done already if the operation had no stream and is in no
    `coalesce` block. `done` and `wait` are not collective. On a host stream `wait` raises the failure of the operation,
    or that of an earlier one at which the stream stopped.
    """


class GroupedWork(Work):
    """A collective inside `Communicator.coalesce`: nothing is sent before the block ends."""

    def __init__(self) -> None:
        super().__init__()
        self._group: Event | None = None

    def started(self, group: Event) -> None:
        """Tell that the block has ended; ``group`` is done when all collectives of the block are done."""
        self._group = group

    def done(self) -> bool:
        """Whether all collectives of the block are done."""
        return self._group is not None and self._group.done()

    def wait(self) -> None:
        """Wait until all collectives of the block are done. Raises CollectiveError while the block is open."""
        self.group.wait()

    @property
    def group(self) -> Event:
        """The event that is done when all collectives of the block are done."""
        if self._group is None:
            raise CollectiveError("wait for a collective of a coalesce() block that has not ended, or failed")
        return self._group


#: the result of every call without a stream that ran on the host
DONE = Work()
DONE._point.open()


class Owner(Protocol):
    """The communicator of a stream."""

    def _close_stream(self, stream: Stream) -> None: ...


class Stream(ABC):
    """An ordered queue of collectives. Made by `Communicator.new_stream`, closed with its communicator.

    Its kinds are a thread (`commengine.calls.thread_stream`), messages (`commengine.calls.message_stream`) and a CUDA
    stream (`commengine.device.stream`). None of them overrides what it inherits.

    name, index: the stream's name in errors and traces, and its number in its communicator, from 1.
    transport: runs the collectives, on an MPI communicator that belongs to the stream alone: its
        `commengine.calls.routes.Routes`, or NCCL's wire.
    device_transport: the same for device tensors, if MPI moves them.
    threaded: whether a worker thread runs the collectives.
    owner: closes the stream for `close`, and is told when it is.
    """

    def __init__(
        self, name: str, index: int, transport: Any, owner: Callable[[], Owner | None], *, threaded: bool = False,
        device_transport: Any = None,
    ) -> None:  # fmt: skip
        self.name, self.index, self.threaded = name, index, threaded
        self.transport, self.device_transport, self._owner = transport, device_transport, owner
        #: whether it takes no more collectives
        self.closed = False
        #: what users of the stream keep for it; it goes when the stream is closed, or dropped
        self.kept: dict[str, Any] = {}

    def lend(self) -> Self:
        """Return the stream for the program: an object of its own with the same state.

        The communicator and the worker keep the stream itself, so only the end of this object tells them that no
        program can use the stream any more.
        """
        lent = object.__new__(type(self))
        lent.__dict__ = self.__dict__
        weakref.finalize(lent, _let_go, weakref.ref(self)).atexit = False
        return lent

    def __copy__(self) -> Stream:
        """Return the stream itself."""
        return self

    def __deepcopy__(self, memo: object) -> Stream:
        """Return the stream itself: a copied layer keeps its stream, as it keeps its communicator."""
        return self

    def close(self) -> None:
        """Finish what is enqueued, end the worker, and free what was made from MPI. Collective; may be called again.

        The communicator closes its streams with itself. A program that makes many closes those that it does not need.
        """
        owner = self._owner()
        if not self.closed and owner is not None:
            owner._close_stream(self)

    @abstractmethod
    def enqueue(
        self, call: Callable[[], None], tensors: tuple[Any, ...] = (), record: Record | None = None, about: object = ""
    ) -> Work:
        """Run ``call()`` after everything that is in the stream already. ``tensors`` live until the Work is waited for.

        record: the traced collective, if there is one. about: what the call is, for a message.
        """

    @abstractmethod
    def record(self) -> Event:
        """Return an event that is done when everything enqueued so far is done."""

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Let everything enqueued from now on start only when ``event`` is done; it may belong to another stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until the stream is empty. Raises the first failure in it."""

    @abstractmethod
    def drain(self) -> None:
        """Block until the stream is empty. A failure stays with those who wait for its collectives."""

    @abstractmethod
    def land(self) -> None:
        """Wait, before the ranks close it together, for what a rank may have to wait for alone."""

    @abstractmethod
    def finish(self) -> None:
        """Finish what is enqueued, and free what was made from MPI or NCCL. Collective."""

    @abstractmethod
    def stop(self, reason: str, *, between: bool = False) -> None:
        """Let nothing more begin, and tell the ranks that share memory with this one.

        A call that MPI carries now goes on: MPI reads and writes its tensors until the other ranks come. between: see
        `Flags.stop`.
        """

    @abstractmethod
    def abandon(self) -> None:
        """End after `stop`, and leave what was made from MPI to the end of MPI. Not collective."""

    @abstractmethod
    def drop(self) -> None:
        """End when what is enqueued is done; nobody can enqueue more. Waits for nothing."""

    @abstractmethod
    def end_with_program(self) -> None:
        """Finish what is enqueued, as long as a program that ends can wait for it."""

    @property
    @abstractmethod
    def untold_failure(self) -> BaseException | None:
        """The stream's failure, unless somebody who waited was told about it."""


def end_job(stream: Stream, late: str | None) -> None:
    """End the job with an error where a program ends and has left collectives in ``stream``.

    late: what was not done in time; None: everything was.
    """
    problem = None
    if late is not None:
        problem = f"{late} is not done {EXIT_SECONDS:.0f} s after the end of the program: did every rank call it?"
    elif (failure := stream.untold_failure) is not None:
        problem = f"a collective failed, and nobody waited for it: {failure}"
    if problem is not None:
        say(f"rank {load_mpi().COMM_WORLD.rank}: stream {stream.name}: {problem}")
        abort(1)


def _let_go(reference: weakref.ref[Stream]) -> None:
    """End the thread of a stream that no program can use any more. Waits for nothing: any thread may be here."""
    stream = reference()
    if stream is not None:
        stream.kept.clear()
    if stream is None or stream.closed or is_child_of_rank():  # its communicator was dropped before, or closed it
        return
    if stream.threaded:  # the other kinds need nothing: what is in flight keeps what was lent
        stream.drop()
    problem = "close it, or its communicator: MPI's communicator of the stream stays until then"
    warnings.warn(f"stream {stream.name} was dropped and not closed; {problem}", ResourceWarning, stacklevel=2)


def is_among(stream: object, streams: Sequence[Stream]) -> bool:
    """Whether ``stream`` is one of ``streams``, lent or not."""
    return isinstance(stream, Stream) and any(one.transport is stream.transport for one in streams)


#: the streams with work that a program may leave behind. A worker, and messages in flight, keep theirs alive
_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


def ends_with_program(stream: Stream) -> None:
    """Let ``stream`` finish when the program ends without closing it."""
    if not _streams:
        atexit.register(_program_ends)
    _streams.add(stream)


def _program_ends() -> None:
    if not is_child_of_rank() and not load_mpi().Is_finalized():
        finish_streams()


def finish_streams() -> None:
    """Finish all streams that are open, in the same order on all ranks, as long as a program that ends can wait."""
    for stream in sorted(_streams, key=lambda one: one.name):
        stream.end_with_program()
