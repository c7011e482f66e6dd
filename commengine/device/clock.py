"""When collectives ran on a device, in the seconds of ``time.perf_counter``: CUDA events, read when asked for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from commengine.trace import CollectiveEvent

#: CUDA tells times between two events as a float32 of milliseconds: after this long that is no longer microseconds
ANCHOR_SECONDS = 10.0


class DeviceClock:
    """Ties a device's events to the host's clock, to some ten microseconds.

    cuda: ``torch.cuda``, or what stands in for it. Its own stream is always idle, so that an event there is reached at
    once, whatever the device computes.
    """

    def __init__(self, cuda: Any, device: torch.device) -> None:
        self.cuda = cuda
        self._stream = cuda.Stream(device)
        self._seconds = 0.0
        self._event: Any = None

    def anchor(self) -> tuple[Any, float]:
        """An event that is done, and when that was."""
        if self._event is None or time.perf_counter() - self._seconds > ANCHOR_SECONDS:
            event = self.cuda.Event(enable_timing=True)
            event.record(self._stream)
            event.synchronize()
            self._event, self._seconds = event, time.perf_counter()
        return self._event, self._seconds


class DeviceTimes:
    """The events of one collective; `settle` writes what they say into its record."""

    def __init__(self, clock: DeviceClock) -> None:
        self._cuda = clock.cuda
        self._anchor, self._anchored = clock.anchor()
        self._marks: dict[str, Any] = {}

    def start(self, stream: Any) -> None:
        """``stream`` gets to the collective."""
        self._mark("start", stream)

    def end(self, stream: Any) -> None:
        """The collective is done."""
        self._mark("end", stream)

    def wait_starts(self, stream: Any) -> None:
        """``stream`` gets to where it waits for the collective; of several waits the first counts."""
        self._mark("wait_start", stream)

    def wait_ends(self, stream: Any) -> None:
        """``stream`` goes on."""
        self._mark("wait_end", stream)

    def _mark(self, what: str, stream: Any) -> None:
        if what not in self._marks:
            event = self._cuda.Event(enable_timing=True)
            event.record(stream)
            self._marks[what] = event

    def settle(self, record: CollectiveEvent) -> None:
        """Wait for the events so far and write their times into ``record``."""
        for what, event in self._marks.items():
            if event is not None:
                event.synchronize()
                setattr(record, what, self._anchored + self._anchor.elapsed_time(event) / 1e3)
                self._marks[what] = None
