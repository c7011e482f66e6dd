"""Stream, Event, Work: ordered queues of collectives.

A host stream is what a CUDA stream is on a device: work enqueued on it runs in order, beside the caller. Here a
worker thread runs it, over a duplicate of the MPI communicator that is the stream's own, so that its collectives
cannot match those of another stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from .errors import CollectiveError

if TYPE_CHECKING:
    from .host.transport import HostTransport
    from .trace import CollectiveEvent


#: traced collectives that a stream remembers for whoever waits for all of them at once
MOST_RECORDS = 1024


class Event:
    """A point in a stream: done when all that was enqueued before it is done."""

    def __init__(self, records: Sequence[CollectiveEvent] = ()) -> None:
        self._records = records  # of the traced collectives that whoever waits here waits for
        self._finished = False
        self._error: BaseException | None = None
        self._told = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def done(self) -> bool:
        """Whether the point was reached. Never blocks."""
        return self._finished

    def wait(self) -> None:
        """Block the calling thread until the point is reached; raise if the stream failed before it."""
        waited = [record for record in self._records if record.wait_start is None]
        for record in waited:
            record.wait_start = time.perf_counter()
        self._block()
        for record in waited:
            record.wait_end = time.perf_counter()
        self._records = ()
        if self._error is not None:
            self._told = True
            raise self._error

    def _block(self) -> None:
        if not self._finished:
            self._gate.acquire()
            self._gate.release()

    def _follow(self) -> None:
        """Wait without being the caller, whose wait and tensors are another matter."""
        self._block()
        if self._error is not None:
            raise self._error

    def _finish(self) -> None:
        self._finished = True
        self._gate.release()


class Work(Event):
    """One enqueued collective. It keeps the tensors in flight alive until `wait` returns."""

    def __init__(self, tensors: tuple[Any, ...] = (), record: CollectiveEvent | None = None) -> None:
        super().__init__(() if record is None else (record,))
        self._tensors = tensors
        self._record = record

    def wait(self) -> None:
        """Block until the collective is done; re-raise what failed there. May be called again, on any thread."""
        try:
            super().wait()
        finally:
            self._tensors = ()


class GroupedWork(Work):
    """A collective inside `Communicator.coalesce`: nothing is sent before the block ends."""

    def __init__(self) -> None:
        super().__init__()
        self._group: Event | None = None

    def started(self, group: Event) -> None:
        """The block has ended; ``group`` is done when all of it is."""
        self._group = group

    def done(self) -> bool:
        """Whether the group is done."""
        return self._group is not None and self._group.done()

    def wait(self) -> None:
        """Wait until the group is done. Raises CollectiveError inside the block: nothing was sent yet."""
        self.group.wait()

    @property
    def group(self) -> Event:
        """What is done when all of the group is."""
        if self._group is None:
            raise CollectiveError("wait for a collective of a coalesce() block that has not ended, or failed")
        return self._group


def finished_work() -> Work:
    """A Work that is done: what a collective without a stream returns."""
    work = Work()
    work._finish()
    return work


class Stream:
    """An ordered queue of host collectives. Made by `Communicator.new_stream`, closed with its communicator.

    transport: runs the collectives, on an MPI communicator of the stream's own. device_transport: those of device
        tensors, where MPI carries them.
    threaded: run them on a worker thread. Without it (MPI offers less than THREAD_MULTIPLE) each runs where it is
        enqueued: the same order, the same results, no overlap.
    """

    def __init__(
        self, name: str, index: int, transport: HostTransport, *, threaded: bool, device_transport: Any = None
    ) -> None:
        self.name = name
        self.index = index
        self.threaded = threaded
        self.transport = transport
        self.device_transport = device_transport
        self._failure: BaseException | None = None
        self._records: list[CollectiveEvent] = []  # traced, and not waited for one by one
        self._failed: list[Event] = []  # what whoever waits for it learns of a failure from
        self._queue: SimpleQueue[tuple[Callable[[], None], Event] | None] = SimpleQueue()
        self._worker: threading.Thread | None = None
        if threaded:
            # A daemon: a program that ends without close() must not hang on an idle worker.
            self._worker = threading.Thread(target=self._serve, name=name, daemon=True)
            self._worker.start()

    def enqueue(
        self, call: Callable[[], None], tensors: tuple[Any, ...] = (), record: CollectiveEvent | None = None
    ) -> Work:
        """Run ``call()`` after all that is in the stream already. ``tensors`` live until the Work is waited for."""
        work = Work(tensors, record)
        if record is not None:
            if len(self._records) >= MOST_RECORDS:
                self._forget_waited()
            self._records.append(record)
        self._put(call, work)
        return work

    def record(self) -> Event:
        """An event that is done when all that is enqueued now is done."""
        self._forget_waited()
        event = Event(tuple(self._records))
        self._put(_nothing, event)
        return event

    def wait_event(self, event: Event) -> None:
        """Let what is enqueued from now on start only when ``event``, of another stream say, is done."""
        self._put((event.group if isinstance(event, GroupedWork) else event)._follow, Event())

    def synchronize(self) -> None:
        """Block until the stream is empty; raise if anything in it failed."""
        self.record().wait()

    def __deepcopy__(self, memo: object) -> Stream:
        """Itself, as the communicator of a copied layer is."""
        return self

    def close(self) -> None:
        """Finish what is enqueued, then end the worker."""
        if self._worker is not None:
            self._queue.put(None)
            self._worker.join()
            self._worker = None

    def free(self) -> None:
        """Free what was made from MPI, after `close`. Collective."""
        self.transport.close()
        self.transport._comm.Free()

    def _forget_waited(self) -> None:
        unwaited = [record for record in self._records if record.wait_start is None]
        self._records = unwaited[-MOST_RECORDS:]

    @property
    def untold_failure(self) -> BaseException | None:
        """What failed here, if nobody who waited was told."""
        return None if any(event._told for event in self._failed) else self._failure

    def _put(self, call: Callable[[], None], event: Event) -> None:
        if self._worker is not None:
            self._queue.put((call, event))
        elif self.threaded:
            raise CollectiveError(f"stream {self.name} is closed")
        else:
            self._run(call, event)
            if isinstance(event, Work) and event._record is not None:  # the caller waited for all of it
                event._record.wait_start, event._record.wait_end = event._record.enqueue, time.perf_counter()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            self._run(*item)
            del item  # else the last tensors would live until the next collective

    def _run(self, call: Callable[[], None], event: Event) -> None:
        try:
            if self._failure is not None:
                # After a failure the ranks may no longer be in step: run nothing more.
                raise CollectiveError(f"stream {self.name} stopped at an earlier failure: {self._failure}")
            call()
        except BaseException as error:  # handed to whoever waits
            self._failure = self._failure or error
            event._error = error
            self._failed.append(event)
        finally:
            event._finish()


def _nothing() -> None:
    pass
