"""The times of collectives on a device, measured with CUDA events and given in seconds of ``time.perf_counter``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from commengine.trace import CollectiveEvent

#: CUDA gives the time between two events as a float32 of milliseconds. After this many seconds it no longer resolves
#: microseconds
ANCHOR_SECONDS = 10.0


class DeviceClock:
    """Ties a device's events to the host's clock, to about ten microseconds.

    cuda: ``torch.cuda``, or a stand-in for it. The clock has a stream of its own, which is always idle, so that an
    event recorded there is reached at once, whatever the device computes.
    """

    def __init__(self, cuda: Any, device: torch.device) -> None:
        self.cuda = cuda
        self._stream = cuda.Stream(device)
        self._seconds = 0.0
        self._event: Any = None

    def anchor(self) -> tuple[Any, float]:
        """Return an event that is done, and the host's time when it was done."""
        if self._event is None or time.perf_counter() - self._seconds > ANCHOR_SECONDS:
            event = self.cuda.Event(enable_timing=True)
            event.record(self._stream)
            event.synchronize()
            self._event, self._seconds = event, time.perf_counter()
        return self._event, self._seconds


class DeviceTimes:
    """The CUDA events of one collective; `settle` turns them into times."""

    def __init__(self, clock: DeviceClock) -> None:
        self._cuda = clock.cuda
        self._anchor, self._anchored = clock.anchor()
        self._marks: dict[str, Any] = {}

    def mark(self, what: str, stream: Any) -> None:
        """Mark that ``stream`` comes to the collective, or leaves it. Only the first of several waits counts.

        what: "start", "end", "wait_start" or "wait_end", as in `commengine.trace.CollectiveEvent`.
        """
        if what not in self._marks:
            event = self._cuda.Event(enable_timing=True)
            event.record(stream)
            self._marks[what] = event

    def settle(self, record: CollectiveEvent) -> None:
        """Wait for the events so far, and write their times into ``record``."""
        for what, event in self._marks.items():
            if event is not None:
                event.synchronize()
                setattr(record, what, self._anchored + self._anchor.elapsed_time(event) / 1e3)
                self._marks[what] = None
