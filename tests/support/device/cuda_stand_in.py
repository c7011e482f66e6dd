"""``torch.cuda`` without a GPU: streams and events whose work runs as late as it may.

Work runs only when somebody waits for it, together with the work that it depends on. Therefore a result that was used
without a wait, and a collective that did not wait for its input, are wrong every time. Whoever asks an event many times
whether it is done waits for it, too. Every piece of work takes one millisecond of this module's own clock.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch

from commengine.device.nccl import Runtime

#: an event that is asked so many times whether it is done is reached
POLLS = 50

#: all streams by their addresses, of which no two are equal
STREAMS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_addresses = itertools.count(0x5000)
_thread = threading.local()  # each thread has its current device, number 0 at first


class CudaStandIn:
    """Has the names of ``torch.cuda`` that commengine uses. A new one makes device 0 the current one of the thread."""

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices
        self.clock_ms = 0.0
        self.streams: WeakSet[Any] = WeakSet()
        self.current_device = 0
        self.contexts: set[int] = set()  # devices that were set by leaving a block of a stream
        self.capturing = False  # a CUDA graph captures the current stream
        self.unused: list[Any] = []
        outer = self

        class Stream:
            def __init__(self, device: Any = None, priority: int = 0) -> None:
                self.priority = priority
                self.cuda_stream = next(_addresses)
                self.queue: deque[tuple[Callable[[], None], Any]] = deque()
                self.running = False
                STREAMS[self.cuda_stream] = self
                outer.streams.add(self)

            # torch's streams, compared with anything but a stream, are neither equal to it nor different from it
            def __eq__(self, other: object) -> bool:
                return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

            def __ne__(self, other: object) -> bool:
                return isinstance(other, Stream) and self.cuda_stream != other.cuda_stream

            def __hash__(self) -> int:
                return hash(self.cuda_stream)

            def put(self, work: Callable[[], None], event: Any = None) -> None:
                self.queue.append((work, event))

            def run(self, until: Any = None) -> None:
                assert not self.running, "a stream waits for itself"
                self.running = True
                try:
                    while self.queue:
                        work, event = self.queue.popleft()
                        outer.clock_ms += 1
                        work()
                        if until is not None and event is until:
                            return
                finally:
                    self.running = False
                assert until is None, "an event that was not recorded here"

            def wait_event(self, event: Any) -> None:
                point = event.point
                if point is not None:
                    self.put(point.reach)

            def wait_stream(self, stream: Any) -> None:
                self.wait_event(stream.record_event())

            def record_event(self, event: Any = None) -> Any:
                event = event or Event()
                event.record(self)
                return event

            def query(self) -> bool:
                return not self.queue

            def synchronize(self) -> None:
                self.run()

        class Point:
            """Where a stream was when an event was recorded."""

            def __init__(self, stream: Stream) -> None:
                self.stream, self.ms = stream, 0.0
                stream.put(self.passed, self)

            def passed(self) -> None:
                self.ms = outer.clock_ms

            def reach(self) -> None:
                if not self.ms:
                    self.stream.run(self)

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.enable_timing = enable_timing
                self.point: Point | None = None
                self.asked = 0

            def record(self, stream: Any = None) -> None:
                self.point = Point(stream or outer.current_stream())

            def wait(self, stream: Any = None) -> None:
                (stream or outer.current_stream()).wait_event(self)

            def query(self) -> bool:
                self.asked += 1
                if self.asked >= POLLS:
                    self.synchronize()
                return self.point is None or bool(self.point.ms)

            def synchronize(self) -> None:
                if self.point is not None:
                    self.point.reach()

            def elapsed_time(self, end: Any) -> float:
                assert self.enable_timing and end.enable_timing and self.query() and end.query()
                return end.point.ms - self.point.ms

        self.Stream, self.Event = Stream, Event
        self._stack = [Stream()]

    @staticmethod
    def current_device_of_thread() -> int:
        return int(getattr(_thread, "device", 0))

    @property
    def current_device(self) -> int:
        return self.current_device_of_thread()

    @current_device.setter
    def current_device(self, index: int) -> None:
        _thread.device = index

    def is_available(self) -> bool:
        return self.devices > 0

    def device_count(self) -> int:
        return self.devices

    def current_stream(self, device: Any = None) -> Any:
        return self._stack[-1]

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()
            self.contexts.add(self.current_device)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current_device = self.current_device, torch.device(device).index or 0
        try:
            yield
        finally:
            self.current_device = before

    def set_device(self, device: Any) -> None:
        self.current_device = torch.device(device).index or 0

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(name="stand-in", uuid=f"GPU-{index}")

    def synchronize(self, device: Any = None) -> None:
        for stream in sorted(self.streams, key=lambda stream: stream.cuda_stream):
            stream.run()

    def kernel(self, work: Callable[[], Any]) -> None:
        """Compute on the current stream, in time."""
        self.current_stream().put(work)


@dataclass(frozen=True)
class HostRuntime(Runtime):
    """A `Runtime` whose device memory is the host's."""

    def byte(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def current_address(self, device: torch.device) -> int:
        return int(self.cuda._stack[-1].cuda_stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target, source = target.detach(), source.detach()
        self.cuda.kernel(lambda: target.copy_(source))


def host_runtime(devices: int = 1, version: int = 23203) -> HostRuntime:
    """A runtime whose NCCL only tells its version."""
    return HostRuntime(SimpleNamespace(get_version=lambda: version), CudaStandIn(devices), 12090)
