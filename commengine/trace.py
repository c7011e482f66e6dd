"""The log of what ran: which collective, on which group, how many bytes, and when.

    with commengine.trace(grid.tensor, grid.data) as log:
        step()
    print(log.summary()); log.save_chrome("trace.json")      # chrome://tracing, ui.perfetto.dev

The bytes of a collective are counted as nccl-tests counts them: the whole buffer of a rank (all-reduce, broadcast,
reduce), or the larger of its two buffers (all-gather: the output; reduce-scatter: the input; gather and scatter: the
root's buffer, on every rank; all_to_all_v: the input). `commengine.operations` has the table.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

#: the format of the files that `Trace.save` writes, and the fields of an event in them. Format 1 had no peers and no
#: buffers
FORMAT = 2
SAVED = (
    "operation", "redop", "root", "peers", "dtype", "shape", "bytes", "buffers", "rows", "group", "size", "stream",
    "enqueue", "start", "end", "wait_start", "wait_end",
)  # fmt: skip


class TracedGroup(Protocol):
    """A communicator, as far as a trace knows it."""

    name: str
    world_rank: int

    @property
    def blocks(self) -> tuple[TracedGroup, ...]:
        """The communicators of its blocks that were made so far (`Communicator.block`)."""

    def world_ranks(self) -> list[int]:
        """The ranks of the group in MPI.COMM_WORLD."""

    @property
    def _calls(self) -> Any:
        """The `commengine.calls.dispatch.Dispatcher`: `attach` and `detach` a log."""


@dataclass(slots=True)
class CollectiveEvent:
    """One collective of this rank. Times are seconds of ``time.perf_counter``.

    peers: the ranks of the group that a message goes to and comes from. buffers: for each tensor among the arguments,
    in order, its bytes and whether the other ranks read or write it in place (see `Communicator.empty`). rows: the
    numbers of rows that an all_to_all_v gets from and sends to each rank, or those of an all_gather_v. times: the
    `commengine.device.clock.DeviceTimes` of a collective on a device.

    Without a stream ``enqueue`` equals ``start``, and the caller waits from ``start`` to ``end``. For a collective on
    a device, ``wait_start`` and ``wait_end`` are those of the CUDA stream that waits, and all times except ``enqueue``
    are known only after `settle`, which `Trace.events` calls.
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
    rows: tuple[tuple[int, ...], ...] = ()
    times: Any = field(default=None, repr=False, compare=False)

    def settle(self) -> None:
        """For a collective on a device: wait until it is done, and fill in its times. Does nothing otherwise."""
        if self.times is not None:
            self.times.settle(self)

    @property
    def seconds(self) -> float:
        """Seconds from start to end; 0 while the collective runs, and if it never ran to its end."""
        return self.end - self.start if self.end else 0.0

    @property
    def hidden_seconds(self) -> float:
        """Return the seconds of this collective during which the caller did not wait."""
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
        """Add one collective."""
        self.count += 1
        self.bytes += event.bytes
        self.seconds += event.seconds
        self.hidden_seconds += event.hidden_seconds


class Trace:
    """The log of a traced region, on this rank only. Made by `trace`."""

    def __init__(self, *comms: TracedGroup) -> None:
        self.rank = comms[0].world_rank if comms else 0
        self._events: list[CollectiveEvent] = []
        self._settled: dict[tuple[str, int, str], Total] = {}
        self._comms = comms  # and the blocks that `follow` finds

    def follow(self, comm: TracedGroup) -> None:
        """Log the collectives of ``comm``, and of its blocks, from now on."""
        self._comms = tuple(dict.fromkeys((*self._comms, comm)))
        comm._calls.attach(self)
        for block in comm.blocks:
            self.follow(block)

    @property
    def events(self) -> list[CollectiveEvent]:
        """All collectives since the last `settle`, in the order of the calls. Waits for those on a device."""
        for event in self._events:
            event.settle()
        return self._events

    def add(self, event: CollectiveEvent) -> None:
        """Append ``event`` to the log."""
        self._events.append(event)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Log nothing inside the block."""
        logged = [comm for comm in self._comms if comm._calls.detach(self)]
        try:
            yield
        finally:
            for comm in logged:
                self.follow(comm)

    def totals(self) -> list[Total]:
        """Return one row per group and operation, the row with the most seconds first."""
        rows = {key: replace(total) for key, total in self._settled.items()}
        for event in self.events:
            key = (event.group, event.size, event.operation)
            rows.setdefault(key, Total(*key)).add(event)
        return sorted(rows.values(), key=lambda row: -row.seconds)

    def settle(self) -> None:
        """Add the events so far to the totals and forget them, so that the log of a long run stays small.

        Call it when no traced collective is in flight.
        """
        self._settled = {(row.group, row.size, row.operation): row for row in self.totals()}
        self.events.clear()

    def summary(self) -> str:
        """Return a table: for each group and operation the count, megabytes, seconds and share hidden under compute."""
        lines = [f"{'group':<16}{'operation':<16}{'count':>9}{'MB':>12}{'seconds':>10}{'hidden':>8}"]
        for row in self.totals():
            hidden = row.hidden_seconds / row.seconds if row.seconds else 0.0
            lines.append(
                f"{f'{row.group} ({row.size})':<16}{row.operation:<16}{row.count:>9}"
                f"{row.bytes / 1e6:>12.3f}{row.seconds:>10.3f}{hidden:>8.0%}"
            )
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write a file of JSON lines, which ``bench.replay`` reads.

        The first line has the format, this rank and the world ranks of each group; the events follow in order. Call it
        when no traced collective is in flight and while the communicators are open. Raises ValueError as `groups` does.
        """
        lines: list[dict[str, Any]] = [{"format": FORMAT, "rank": self.rank, "groups": self.groups()}]
        lines += [{name: getattr(event, name) for name in SAVED} for event in self.events]
        Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def groups(self) -> dict[str, list[int]]:
        """The world ranks of each traced group, by its name. Call it while the communicators are open.

        Raises ValueError when two groups have the same name, because a file could not tell them apart.
        """
        found = {comm.name: comm.world_ranks() for comm in self._comms}
        if len(found) < len(self._comms):
            raise ValueError(f"traced groups need different names, not {[comm.name for comm in self._comms]}")
        return found

    def save_chrome(self, path: str | Path) -> None:
        """Write a Chrome trace in microseconds, with one process for this rank and one thread for each stream."""
        threads = {name: number for number, name in enumerate(dict.fromkeys(e.stream for e in self.events))}
        entries: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
        ]
        for name, thread in threads.items():
            label = {"name": name or "caller"}
            entries.append({"ph": "M", "name": "thread_name", "pid": self.rank, "tid": thread, "args": label})
        for event in self.events:
            details = {
                "group": event.group, "size": event.size, "dtype": event.dtype, "shape": list(event.shape),
                "bytes": event.bytes, "redop": event.redop, "root": event.root,
                "enqueued_us": event.enqueue * 1e6, "hidden_us": event.hidden_seconds * 1e6,
            }  # fmt: skip
            entries.append(
                {"ph": "X", "name": f"{event.operation} {event.group}", "cat": "collective", "pid": self.rank,
                 "tid": threads[event.stream], "ts": event.start * 1e6, "dur": event.seconds * 1e6, "args": details}
            )  # fmt: skip
        Path(path).write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}))


@contextlib.contextmanager
def trace(*comms: TracedGroup) -> Iterator[Trace]:
    """Log every collective of the communicators ``comms``, and of their `blocks`, on this rank while the block runs.

    A block that is made meanwhile is logged, too; a part that is split off is not, because it is closed by itself.
    Not collective: each rank may trace other groups. Traces nest. Costs about a microsecond a collective inside the
    block, and nothing outside.
    """
    log = Trace(*comms)
    for comm in comms:
        log.follow(comm)
    try:
        yield log
    finally:
        for comm in log._comms:
            comm._calls.detach(log)
