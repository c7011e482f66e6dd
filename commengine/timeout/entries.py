"""What a rank remembers of its collectives, so that the watcher can tell how far it is in each group."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from commengine.agreement import Shown, describe


@dataclass(eq=False, slots=True)
class Entry:
    """One collective of this rank.

    sequence: see `WatchedGroup`. number: its number in the sequence, from 1.
    tensor, redop, root: describe the call. peers: the ranks of the group that a message goes to and comes from.
    enqueued, started, ended: in seconds of ``time.monotonic``; 0 for a time that has not come yet.
    done: asked at every look, for a collective whose end no thread of ours sees (on a device).
    words: what the program says about the call (`Communicator.about`).
    """

    group: WatchedGroup
    sequence: str
    number: int
    operation: str
    tensor: Shown | None
    redop: str | None
    root: int | None
    peers: tuple[int, ...]
    enqueued: float
    started: float = 0.0
    ended: float = 0.0
    done: Callable[[], bool] | None = None
    words: str = ""

    def start(self) -> None:
        """The collective runs now: its time counts from here."""
        self.post()
        self.count()

    def post(self) -> None:
        """The collective runs now, and nobody waits for it: its time does not count before `count`."""
        self.started = time.monotonic()
        self.group.started[self.sequence] = (self.number, self.operation)

    def count(self) -> None:
        """Somebody waits now: the time of the collective counts from here."""
        self.started = time.monotonic()
        if not self.group.over:
            self.group.running[id(self)] = self

    def end(self) -> None:
        """The collective is done, or has failed."""
        self.ended = time.monotonic()
        self.group.running.pop(id(self), None)

    def __str__(self) -> str:
        where = f"group {self.group.name!r}" + (f", {self.sequence}" if self.sequence else "")
        if not self.started:
            state = "not started"
        elif not self.ended:
            state = f"running for {time.monotonic() - self.started:.1f} s"
        else:
            state = f"done in {self.ended - self.started:.3g} s"
        call = describe(self.operation, self.tensor, self.redop, self.root)
        return f"#{self.number} {call} of {where}{self.about}: {state}"

    @property
    def about(self) -> str:
        """The words in brackets, after a space; nothing if there are none."""
        return f" ({self.words})" if self.words else ""


@dataclass(eq=False)
class WatchedGroup:
    """What the watcher knows of one communicator: who is in it, and how far this rank is in each of its sequences.

    A sequence is an ordered list of collectives, which all ranks of the group run in the same order: "" is the caller's
    own, and each stream has one. Its collectives are numbered from 1. Sends and receives may differ from rank to rank,
    and therefore have a sequence of their own.

    key: the same on all ranks of the group, and different for every group.
    ranks, world_ranks: each member's rank in the root communicator and in MPI.COMM_WORLD.
    last, running: of all groups of the watcher: the last collectives, and those that run now, by their ``id``.
    enqueued: by sequence, the number of the last collective enqueued. started: the number and operation of the last one
        started.
    alarms: asked at every look until the communicator is closed; each returns a problem from elsewhere, such as an
        asynchronous error of NCCL, or None.
    splits: how often the group was split.
    over: the root communicator is closed, and nobody looks any more. left: on this rank alone.
    """

    key: str
    name: str
    ranks: tuple[int, ...]
    world_ranks: tuple[int, ...]
    last: deque[Entry] = field(default_factory=deque)
    running: dict[int, Entry] = field(default_factory=dict)
    enqueued: dict[str, int] = field(default_factory=dict)
    started: dict[str, tuple[int, str]] = field(default_factory=dict)
    alarms: list[Callable[[], str | None]] = field(default_factory=list)
    splits: int = 0
    over: bool = False
    left: bool = False

    def enqueue(
        self, sequence: str, operation: str, tensor: Tensor | None = None, redop: str | None = None,
        root: int | None = None, peers: Sequence[int] = (), *, words: str = "",
    ) -> Entry:  # fmt: skip
        """Return the entry of a new collective. The caller then calls `Entry.start` and `Entry.end`."""
        if peers:
            sequence = f"{sequence} point to point".strip()
        number = self.enqueued.get(sequence, 0) + 1
        self.enqueued[sequence] = number
        shown = None if tensor is None else Shown(tensor.shape, tensor.dtype, tensor.is_cpu)
        entry = Entry(
            self, sequence, number, operation, shown, redop, root, tuple(peers), time.monotonic(), words=words
        )
        self.last.append(entry)
        return entry
