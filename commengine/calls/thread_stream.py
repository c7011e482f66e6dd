"""ThreadStream: a host stream whose worker thread runs the collectives, beside the caller.

The worker runs them over a duplicate of the MPI communicator that belongs to the stream alone, so that its collectives
cannot match those of another stream.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from commengine.errors import CollectiveError
from commengine.host.polling import LAND_SECONDS
from commengine.stream import EXIT_SECONDS, Event, GroupedWork, Owner, Record, Stream, Work, end_job, ends_with_program

from .routes import Routes

#: the number of traced collectives that a stream remembers for a caller that waits for all of them at once
MOST_RECORDS = 1024


class ThreadStream(Stream):
    """An ordered queue of host collectives on a thread of its own. Made by `Communicator.new_stream`.

    release: frees the MPI communicator. Collective. threaded: False, when MPI offers less than THREAD_MULTIPLE: each
    collective then runs when it is enqueued: the same order and the same results, but no overlap.
    """

    def __init__(
        self, name: str, index: int, transport: Routes, owner: Callable[[], Owner | None], *, threaded: bool,
        device_transport: Any, release: Callable[[], object],
    ) -> None:  # fmt: skip
        super().__init__(name, index, transport, owner, threaded=threaded, device_transport=device_transport)
        self._routes, self._free = transport, release
        self._failure: BaseException | None = None
        self._current: Event | None = None  # what the worker runs
        self._records: list[Record] = []  # traced collectives that nobody has waited for one by one
        self._failed: list[Event] = []  # events that hand the failure to whoever waits for them
        self._queue: SimpleQueue[tuple[Callable[[], None], Event] | None] = SimpleQueue()
        self._worker: threading.Thread | None = None
        if threaded:
            # A daemon thread: a program that ends without close() must not hang on an idle worker.
            self._worker = threading.Thread(target=self._serve, name=name, daemon=True)
            self._worker.start()
            ends_with_program(self)

    def enqueue(
        self, call: Callable[[], None], tensors: tuple[Any, ...] = (), record: Record | None = None, about: object = ""
    ) -> Work:
        """Run ``call()`` after everything that is in the stream already. ``tensors`` live until the Work is waited for.

        record: the traced collective, if there is one. about: what the call is, for a message.
        """
        work = Work(None, () if record is None else (record,), tensors)
        work._about = about
        if record is not None:
            if len(self._records) >= MOST_RECORDS:
                self._forget_waited()
            self._records.append(record)
        self._put(call, work)
        return work

    def record(self) -> Event:
        """Return an event that is done when everything enqueued so far is done."""
        self._forget_waited()
        event = Event(None, tuple(self._records))
        self._put(_nothing, event)
        return event

    def wait_event(self, event: Event) -> None:
        """Let everything enqueued from now on start only when ``event`` is done; it may belong to another stream."""
        self._put((event.group if isinstance(event, GroupedWork) else event)._follow, Event())

    def synchronize(self) -> None:
        """Block until the stream is empty. Raises the first failure in it."""
        self.record().wait()

    def drain(self) -> None:
        """Block until the stream is empty. A failure stays with those who wait for its collectives."""
        self.record()._reach()

    def finish(self) -> None:
        """End the worker when it has done what is enqueued, and free what was made from MPI. Collective."""
        if self._worker is not None:
            self._queue.put(None)
            self._worker.join()
            self._worker = None
        self.closed = True
        self._routes.close()
        self._free()

    def stop(self, reason: str, *, between: bool = False) -> None:
        """Let nothing more begin, and tell the ranks that share memory with this one.

        A call that MPI carries now goes on: MPI reads and writes its tensors until the other ranks come. between: see
        `Flags.stop`.
        """
        self._failure = self._failure or CollectiveError(reason)
        self._routes.stop(reason, between=between)

    def abandon(self) -> None:
        """End the worker after `stop`, and leave the MPI communicator to the end of MPI. Not collective."""
        if self._worker is not None:
            self._queue.put(None)
            self._routes.wire.stop("the communicator is closed")
            self._worker.join(EXIT_SECONDS)
            self._worker = None
        self.closed = True
        self._routes.abandon()

    def drop(self) -> None:
        """End the worker when it has done what is enqueued; nobody can enqueue more. Waits for nothing."""
        self.closed = True
        self._queue.put(None)

    def end_with_program(self) -> None:
        """Finish what is enqueued, as long as a program that ends can wait for it."""
        # Python ends the threads that are left when they ask for its lock, and a thread inside PyTorch then aborts the
        # process. So the worker ends first.
        if self._worker is None:
            return
        self._queue.put(None)
        self._worker.join(EXIT_SECONDS)
        current = self._current
        late = None if current is None else str(current._about)
        if late is not None:
            self.stop("the program ended")
            self._routes.wire.stop("the program ended")
            self._worker.join(2 * LAND_SECONDS)
        self._worker = None
        end_job(self, late)

    def _forget_waited(self) -> None:
        unwaited = [record for record in self._records if record.wait_start is None]
        self._records = unwaited[-MOST_RECORDS:]

    @property
    def _stopped(self) -> str:
        return f"stream {self.name} stopped at an earlier failure: {self._failure}"

    @property
    def untold_failure(self) -> BaseException | None:
        """The stream's failure, unless somebody who waited was told about it."""
        return None if not self._failed or any(event._told for event in self._failed) else self._failure

    def _put(self, call: Callable[[], None], event: Event) -> None:
        if self._worker is not None and self.closed:  # dropped: the worker does what it has, and ends
            if isinstance(event, Work):
                raise CollectiveError(f"stream {self.name} is closed")
            self._worker.join()
            self._run(call, event)
        elif self._worker is not None:
            self._queue.put((call, event))
        elif self.threaded:
            raise CollectiveError(f"stream {self.name} is closed")
        else:
            self._run(call, event)
            if isinstance(event, Work):
                for record in event._records:  # the caller waited for all of it
                    record.wait_start, record.wait_end = record.enqueue, time.perf_counter()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            self._run(*item)
            del item  # otherwise the last tensors would live until the next collective

    def _run(self, call: Callable[[], None], event: Event) -> None:
        self._current = event
        try:
            if self._failure is not None:
                # After a failure the ranks may no longer be in step: run nothing more.
                raise CollectiveError(self._stopped)
            call()
        except BaseException as error:  # handed to whoever waits
            event._error = error
            self._failed.append(event)
            if self._failure is None:
                self._failure = error
                if not getattr(error, "on_all_ranks", False):
                    self._tell(str(error))
        finally:
            self._current = None
            event._about = ""  # it holds the tensors
            event._point.open()

    def _tell(self, reason: str) -> None:
        """Tell the ranks that share memory: one that is in this call, or will be, must not wait for this rank.

        Another error, such as of memory, must neither keep it from them nor end the worker, which others wait for.
        """
        for _ in range(3):
            with contextlib.suppress(BaseException):
                self._routes.stop(reason)
                return

    def land(self) -> None:
        """Do nothing: the worker is waited for in `finish`."""


def _nothing() -> None:
    pass
