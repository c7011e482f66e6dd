"""MessageStream: a host stream without a thread, whose messages MPI starts when they are enqueued.

The worker thread of another host stream polls while it waits for a message, and so takes the core from the computation.
Here MPI has a message before the call that enqueues it returns, and the Work finishes it when somebody waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from commengine.errors import CollectiveError, TransferError
from commengine.job_end import is_child_of_rank
from commengine.mpi import load_mpi
from commengine.operations.exchange import Flight, MessageOperation
from commengine.operations.operation import Call
from commengine.stream import EXIT_SECONDS, Event, GroupedWork, Owner, Stream, Work, end_job, ends_with_program
from commengine.timeout.entries import Entry
from commengine.trace import CollectiveEvent

from .routes import Routes


class MessageWork(Work):
    """The messages of one call. They and their tensors live until they are found done, also if this is dropped.

    error_of: makes the error of the call from that of the transport.
    """

    def __init__(
        self,
        stream: MessageStream,
        flight: Flight,
        record: CollectiveEvent | None,
        entry: Entry | None,
        error_of: Callable[[Exception], CollectiveError],
    ) -> None:
        super().__init__(stream, () if record is None else (record,))
        self._flight: Flight | None = flight  # None: it is over
        self._record, self._entry, self._error_of = record, entry, error_of
        # Two threads must not wait for one request of MPI. A thread may take the lock again: a signal can come after it
        # was taken, and before the block that gives it back.
        self._turn = threading.RLock()

    def done(self) -> bool:
        """Whether the messages are over. Never blocks."""
        # Another thread waits for them, or they are those of the parent of this process.
        if is_child_of_rank() or not self._turn.acquire(blocking=False):
            return False
        try:
            return self._flight is None or self._finish(self._flight.test)
        finally:
            self._turn.release()

    def _reach(self) -> None:
        if is_child_of_rank():
            raise CollectiveError("this process is a forked child: its parent has the messages")
        with self._turn:
            if self._flight is None:
                return
            if self._entry is not None:
                # The timeout counts from here. A receive that is posted early is not late while its sender computes,
                # and nothing hangs before somebody waits for it. A peer that has died is missed then, too.
                self._entry.count()
            try:
                self._finish(self._flight.wait)
            finally:
                if self._entry is not None:
                    self._entry.end()

    def _finish(self, step: Callable[[], bool | None]) -> bool:
        """Take a step towards the end. Returns whether the messages are over."""
        try:
            if step() is False:
                return False
        except (load_mpi().Exception, TransferError) as error:
            self._error = self._error_of(error)
            self._point._failed.append(self)
            if not self._error.in_step and self._flight is not None:  # MPI may still match its messages with later ones
                self._flight.keep()
                self._point.stop(str(self._error))
        if self._record is not None:
            self._record.end = time.perf_counter()
        if self._entry is not None:
            self._entry.end()
        self._flight, self._about, self._point = None, "", None  # the stream keeps works, and no work keeps a stream
        return True


class _Landing(Event):
    """The end of all messages that were in flight at a point of the stream."""

    def __init__(self, stream: MessageStream, works: tuple[MessageWork, ...]) -> None:
        super().__init__(stream, [record for work in works for record in work._records])
        self._works = works

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def wait(self) -> None:
        try:
            super().wait()
        finally:
            if self._told:  # of the first failure
                for work in self._point._failed:
                    work._told = True

    def _reach(self) -> None:
        for work in self._works:
            work._reach()
        failed = (work._error for work in self._works if work._error is not None)
        self._error = next(failed, self._point.untold_failure)


class MessageStream(Stream):
    """Messages of host tensors, without a thread. Made by ``new_stream(threaded=False)``, closed with its communicator.

    transport: the routes of an MPI communicator that belongs to the stream alone; only their wire is used, and a wait
    polls only if the wire does. release: see `Stream`.

    A message of another length is an error of its own Work, and the stream goes on: MPI has the later messages already.
    """

    def __init__(
        self, name: str, index: int, transport: Routes, owner: Callable[[], Owner | None], release: Callable[[], object]
    ) -> None:
        super().__init__(name, index, transport, owner)
        self._free = release
        self._failure: BaseException | None = None
        self._failed: list[MessageWork] = []
        self._in_flight: deque[MessageWork] = deque()
        ends_with_program(self)

    def refusal(self, call: Call) -> str | None:
        """Return why the stream cannot take ``call``, or None."""
        if self.closed:
            return f"stream {self.name} is closed"
        if self._failure is not None:
            return f"stream {self.name} stopped at an earlier failure: {self._failure}"
        if not isinstance(call.operation, MessageOperation):
            return f"stream {self.name} takes messages only (send, recv, sendrecv): see new_stream(threaded=False)"
        if call.tensor is not None and not call.tensor.is_cpu:
            problem = f"stream {self.name} takes host tensors only, the tensor lies on {call.tensor.device}"
            return f"{problem}: copy it to the host, or use a stream of new_stream() without threaded=False"
        return None

    def start(
        self,
        call: Call,
        record: CollectiveEvent | None,
        entry: Entry | None,
        error_of: Callable[[Exception], CollectiveError],
    ) -> MessageWork:
        """Give the messages of ``call`` to MPI."""
        flight = call.operation.flight(self.transport.wire, *call.args)  # type: ignore[attr-defined]
        work = MessageWork(self, flight, record, entry, error_of)
        work._about = call
        self._in_flight.append(work)  # before the start: MPI may refuse the second message and have the first
        if record is not None:
            record.start = time.perf_counter()
        if entry is not None:
            entry.post()
        flight.start()
        self._forget_done()
        return work

    def enqueue(
        self, call: Callable[[], None], tensors: tuple[Any, ...] = (), record: Any = None, about: object = ""
    ) -> Work:
        """Raise CollectiveError: there is no thread that could run ``call`` later."""
        raise CollectiveError(f"stream {self.name} takes messages only: see new_stream(threaded=False)")

    def record(self) -> Event:
        """Return an event that is done when all messages that are in flight now are over."""
        self._check_open()
        self._forget_done()
        return _Landing(self, tuple(self._in_flight))

    def wait_event(self, event: Event) -> None:
        """Block until ``event`` is done, so that later messages start after it. Raises the failure before it."""
        self._check_open()
        (event.group if isinstance(event, GroupedWork) else event)._follow()

    def synchronize(self) -> None:
        """Block until all messages are over. Raises the first failure."""
        self.record().wait()

    def drain(self) -> None:
        """Block until all messages are over. A failure stays with those who wait for its messages."""
        self.record()._reach()

    def stop(self, reason: str, *, between: bool = False) -> None:
        """Take no more messages, and tell the ranks that share memory with this one."""
        self._failure = self._failure or CollectiveError(reason)
        self.transport.stop(reason, between=between)

    def land(self) -> None:
        """Wait for all messages, unless the stream is closed or MPI has ended.

        A peer that never comes keeps it waiting, as it keeps the thread of another stream: until the timeout.
        """
        if not self.closed and not load_mpi().Is_finalized():
            self.drain()

    def finish(self) -> None:
        """Wait for all messages, take no more, and free what was made from MPI. Collective."""
        self.land()
        self._in_flight.clear()
        self.closed = True
        self.transport.close()
        self._free()

    @property
    def untold_failure(self) -> BaseException | None:
        """The first failure that nobody who waited was told about."""
        return next((work._error for work in self._failed if not work._told), None)

    def abandon(self) -> None:
        """Take no more messages after `stop`, and keep the tensors of those that MPI still has. Not collective."""
        self.drop()
        self.closed = True
        self.transport.abandon()

    def drop(self) -> None:
        """Keep the tensors of the messages that MPI still has."""
        for work in self._in_flight:
            if work._flight is not None:
                work._flight.keep()
        self._in_flight.clear()

    def end_with_program(self) -> None:
        """Wait for the messages, as long as a program that ends can wait: MPI would write into freed memory."""
        if self.closed or self._failure is not None:
            return
        end, last = time.monotonic() + EXIT_SECONDS, self.record()
        while not last.done() and time.monotonic() < end:
            time.sleep(1e-3)
        end_job(self, next((str(work._about) for work in self._in_flight if not work.done()), None))

    def _forget_done(self) -> None:
        """Let go of the oldest messages that are over, also if nobody waits for them."""
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft()

    def _check_open(self) -> None:
        if self.closed:
            raise CollectiveError(f"stream {self.name} is closed")
