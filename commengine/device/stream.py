"""DeviceStream and DeviceWork: a CUDA stream with the methods of `Stream`. Only `synchronize` blocks the host.

A collective enqueued here starts after everything that the caller's stream (torch's current one) holds at that moment,
and ``work.wait()`` lets the caller's stream go on only when the collective is done. Until then the Work holds the
tensors, so that their memory cannot be given to another tensor while NCCL uses it. No ``record_stream`` is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from commengine.stream import Event, GroupedWork, Owner, Stream, Work

if TYPE_CHECKING:
    from commengine.trace import CollectiveEvent

    from .nccl import NcclWire


class DeviceWork(Work):
    """A point in a device stream, and the collectives in flight before it.

    event: the CUDA event at the point. callers: the streams that the tensors come from. They too go on only when the
    point is reached, because memory that is freed after `wait` is given out again there. before: the works that this
    one covers.
    """

    def __init__(
        self,
        transport: NcclWire,
        event: Any,
        callers: Sequence[Any],
        tensors: tuple[Any, ...] = (),
        records: Sequence[CollectiveEvent] = (),
        before: Sequence[DeviceWork] = (),
    ) -> None:
        super().__init__(event, records, tensors)
        self._transport = transport
        self.event = event
        self._callers = callers
        self._before = before

    def wait(self) -> None:
        """Let torch's current stream go on only when the point is reached. The host goes on. May be called again."""
        cuda, device = self._transport.runtime.cuda, self._transport.device
        current = cuda.current_stream(device)
        timed = [record.times for record in self._records if record.times is not None]
        for times in timed:
            times.mark("wait_start", current)
        current.wait_event(self.event)
        for times in timed:
            times.mark("wait_end", current)
        for caller in self._callers:
            if caller != current:
                caller.wait_event(self.event)
        self._release()

    def _release(self) -> None:
        self._tensors, self._records = (), ()
        for work in self._before:
            work._release()
        self._before = ()


class DeviceStream(Stream):
    """An ordered queue of device collectives: a CUDA stream, with an NCCL communicator of its own.

    Made by `Communicator.new_stream`, closed with its communicator. transport: runs the collectives, and enqueues them
    on ``cuda_stream``.
    """

    def __init__(
        self, name: str, index: int, transport: NcclWire, cuda_stream: Any, owner: Callable[[], Owner | None]
    ) -> None:
        super().__init__(name, index, transport, owner, device_transport=transport)
        self.cuda_stream = cuda_stream
        self._cuda = transport.runtime.cuda
        self._in_flight: deque[DeviceWork] = deque()

    def enqueue(
        self, call: Callable[[], None], tensors: tuple[Any, ...] = (), record: CollectiveEvent | None = None,
        about: object = "",
    ) -> DeviceWork:  # fmt: skip
        """Run ``call()``, which enqueues on ``cuda_stream``, after everything that it and the caller's stream hold.

        ``tensors`` live until the Work is waited for, or until it is dropped and done. Raises the errors of ``call``.
        """
        self._forget_done()
        caller = self._cuda.current_stream(self.transport.device)
        self.cuda_stream.wait_stream(caller)
        call()
        work = DeviceWork(
            self.transport, self.cuda_stream.record_event(), (caller,), tensors, () if record is None else (record,)
        )
        self._in_flight.append(work)
        return work

    def record(self) -> DeviceWork:
        """Return an event that is done when everything enqueued so far is done."""
        self._forget_done()
        before = tuple(self._in_flight)
        callers = list(dict.fromkeys(caller for work in before for caller in work._callers))
        records = [record for work in before for record in work._records]
        return DeviceWork(self.transport, self.cuda_stream.record_event(), callers, (), records, before)

    def wait_event(self, event: Event) -> None:
        """Let everything enqueued from now on start only when ``event`` is done.

        For an event of another device stream the device waits, for an event of a host stream the host does.
        """
        if isinstance(event, GroupedWork):
            event = event.group
        if isinstance(event, DeviceWork):
            self.cuda_stream.wait_event(event.event)
        else:
            event._follow()

    def synchronize(self) -> None:
        """Block the host until the stream is empty."""
        self.cuda_stream.synchronize()
        self._forget_done()

    def drain(self) -> None:
        """Block the host until the stream is empty."""
        self.synchronize()

    def land(self) -> None:
        """Do nothing: NCCL waits in `finish`."""

    def end_with_program(self) -> None:
        """Do nothing: NCCL's communicator ends itself."""

    @property
    def untold_failure(self) -> None:
        """None: the watcher asks NCCL."""
        return None

    def finish(self) -> None:
        """Finish what is enqueued, then end the NCCL communicator. Collective."""
        self.closed = True
        self.transport.close()
        self._in_flight.clear()

    def drop(self) -> None:
        """Do nothing: NCCL's communicator ends itself when it is dropped."""

    def stop(self, reason: str, *, between: bool = False) -> None:
        """Do nothing: the communicator refuses the calls, and NCCL has those before."""

    def abandon(self) -> None:
        """End the NCCL communicator without the other ranks."""
        self.closed = True
        self.transport.abort()
        self._in_flight.clear()

    def _forget_done(self) -> None:
        """Let go of the tensors of works that nobody waited for, once the device is done with them."""
        while self._in_flight and (not self._in_flight[0]._tensors or self._in_flight[0].done()):
            self._in_flight.popleft()
