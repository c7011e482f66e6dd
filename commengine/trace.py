"""What ran, on which group, how many bytes, when.

    with commengine.trace(grid.tensor, grid.data) as log:
        step()
    print(log.summary()); log.save_chrome("trace.json")      # chrome://tracing, ui.perfetto.dev

Bytes are those of nccl-tests: the whole buffer of a rank (all-reduce, broadcast, reduce), or the larger of its two
(all-gather: the output; reduce-scatter: the input; gather and scatter: the root's buffer, on every rank).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calls.checks import ArgumentChecks
    from .communicator import Communicator
    from .device.clock import DeviceTimes


#: of the files that `Trace.save` writes, and what they say of an event. Format 1 had no peers and no buffers
FORMAT = 2
SAVED = (
    "operation", "redop", "root", "peers", "dtype", "shape", "bytes", "buffers", "group", "size", "stream",
    "enqueue", "start", "end", "wait_start", "wait_end",
)  # fmt: skip


@dataclass(slots=True)
class CollectiveEvent:
    """One collective of this rank. Times are seconds of ``time.perf_counter``.

    peers: the ranks of the group that a message goes to and comes from. buffers: of each tensor among the arguments,
    in their order, the bytes, and whether the other ranks read or write it where it lies (see `Communicator.empty`).
    Without a stream enqueue equals start, and the caller waits from start to end. Of a collective on a device the
    waiting is that of the stream which waits, and all times but ``enqueue`` are there after `settle`, which
    `Trace.events` calls.
    """

    operation: str
    redop: str | None
    root: int | None
    dtype: str
    shape: tuple[int, ...]
    elements: int
    bytes: int
    group: str
    size: int
    stream: str | None
    enqueue: float
    start: float = 0.0
    end: float = 0.0
    wait_start: float | None = None
    wait_end: float | None = None
    peers: tuple[int, ...] = ()
    buffers: tuple[tuple[int, bool], ...] = ()
    times: DeviceTimes | None = field(default=None, repr=False, compare=False)

    def settle(self) -> None:
        """Of a collective on a device: wait until it is done, and fill in when it ran."""
        if self.times is not None:
            self.times.settle(self)

    @property
    def seconds(self) -> float:
        """From start to end; 0 while it runs, and for one that never did."""
        return self.end - self.start if self.end else 0.0

    @property
    def hidden_seconds(self) -> float:
        """How much of that the caller did not wait for: hidden under compute."""
        if self.stream is None:
            return 0.0
        if self.wait_start is None or self.wait_end is None:
            return self.seconds
        exposed = min(self.end, self.wait_end) - max(self.start, self.wait_start)
        return self.seconds - max(0.0, exposed)


@dataclass(slots=True)
class Total:
    """The sum over all collectives of one operation on one group."""

    group: str
    size: int
    operation: str
    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    hidden_seconds: float = 0.0

    def add(self, event: CollectiveEvent) -> None:
        self.count += 1
        self.bytes += event.bytes
        self.seconds += event.seconds
        self.hidden_seconds += event.hidden_seconds


class Trace:
    """The log of a traced region, of this rank alone. `trace` makes one."""

    def __init__(self) -> None:
        self.rank = 0
        self._events: list[CollectiveEvent] = []
        self._settled: dict[tuple[str, int, str], Total] = {}
        self._comms: tuple[Communicator, ...] = ()

    @property
    def events(self) -> list[CollectiveEvent]:
        """All collectives since `settle`, in the order of the calls. Waits for those on a device."""
        for event in self._events:
            event.settle()
        return self._events

    def add(self, event: CollectiveEvent) -> None:
        """Log ``event``."""
        self._events.append(event)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Log nothing inside the block."""
        logged = [comm for comm in self._comms if self in comm._logs]
        self._detach()
        try:
            yield
        finally:
            for comm in logged:
                comm._logs += (self,)

    def _attach(self) -> None:
        for comm in self._comms:
            comm._logs += (self,)

    def _detach(self) -> None:
        for comm in self._comms:
            comm._logs = tuple(other for other in comm._logs if other is not self)

    def totals(self) -> list[Total]:
        """One row per group and operation, the largest first."""
        rows = {key: Total(**{n: getattr(t, n) for n in Total.__slots__}) for key, t in self._settled.items()}
        for event in self.events:
            _add(rows, event)
        return sorted(rows.values(), key=lambda row: -row.seconds)

    def settle(self) -> None:
        """Fold the events so far into the totals and forget them: a long run's log stays small.

        Call it when no traced collective is in flight.
        """
        for event in self.events:
            _add(self._settled, event)
        self.events.clear()

    def summary(self) -> str:
        """A table: per group and operation the count, bytes, seconds, and the share hidden under compute."""
        lines = [f"{'group':<16}{'operation':<16}{'count':>9}{'MB':>12}{'seconds':>10}{'hidden':>8}"]
        for row in self.totals():
            hidden = row.hidden_seconds / row.seconds if row.seconds else 0.0
            lines.append(
                f"{f'{row.group} ({row.size})':<16}{row.operation:<16}{row.count:>9}"
                f"{row.bytes / 1e6:>12.3f}{row.seconds:>10.3f}{hidden:>8.0%}"
            )
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write JSON lines: first the format, this rank and the world ranks of each group, then the events in order.

        Call it when nothing traced is in flight and the communicators are open. Raises ValueError where two of them
        have one name, for then the file could not tell them apart.
        """
        groups = {comm.name: comm.world_ranks() for comm in self._comms}
        if len(groups) < len(self._comms):
            raise ValueError(f"traced groups need names of their own, not {[comm.name for comm in self._comms]}")
        lines: list[dict[str, Any]] = [{"format": FORMAT, "rank": self.rank, "groups": groups}]
        lines += [{name: getattr(event, name) for name in SAVED} for event in self.events]
        Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def save_chrome(self, path: str | Path) -> None:
        """Write the events as a Chrome trace (microseconds); the process is the rank, a thread is a stream."""
        lanes = {name: lane for lane, name in enumerate(dict.fromkeys(e.stream for e in self.events))}
        entries: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
        ]
        for name, lane in lanes.items():
            label = {"name": name or "caller"}
            entries.append({"ph": "M", "name": "thread_name", "pid": self.rank, "tid": lane, "args": label})
        for event in self.events:
            details = {
                "group": event.group, "size": event.size, "dtype": event.dtype, "shape": list(event.shape),
                "bytes": event.bytes, "redop": event.redop, "root": event.root,
                "enqueued_us": event.enqueue * 1e6, "hidden_us": event.hidden_seconds * 1e6,
            }  # fmt: skip
            entries.append(
                {"ph": "X", "name": f"{event.operation} {event.group}", "cat": "collective", "pid": self.rank,
                 "tid": lanes[event.stream], "ts": event.start * 1e6, "dur": event.seconds * 1e6, "args": details}
            )  # fmt: skip
        Path(path).write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}))


def _add(rows: dict[tuple[str, int, str], Total], event: CollectiveEvent) -> None:
    key = (event.group, event.size, event.operation)
    rows.setdefault(key, Total(*key)).add(event)


@contextlib.contextmanager
def trace(*comms: Communicator) -> Iterator[Trace]:
    """Log every collective of ``comms`` on this rank while the block runs. Traces nest; ranks may differ.

    Costs about a microsecond a collective inside the block, and one attribute test outside.
    """
    log = Trace()
    if comms:
        log.rank = comms[0].world_rank
    log._comms = tuple(dict.fromkeys(comms))
    log._attach()
    try:
        yield log
    finally:
        log._detach()


def begin(
    operation: str,
    tensor: Any,
    comm: ArgumentChecks,
    stream: str | None,
    redop: str | None,
    root: int | None,
    nbytes: int,
    peers: tuple[int, ...],
    buffers: tuple[tuple[int, bool], ...],
) -> CollectiveEvent:
    """The record of a collective that is about to be enqueued."""
    now = time.perf_counter()
    shape, dtype, elements = (
        ((), "none", 0) if tensor is None else (tuple(tensor.shape), str(tensor.dtype), tensor.numel())
    )
    name = dtype.removeprefix("torch.")
    return CollectiveEvent(
        operation, redop, root, name, shape, elements, nbytes, comm.name, comm.size, stream, now, now,
        peers=peers, buffers=buffers,
    )  # fmt: skip
