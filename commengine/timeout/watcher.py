"""``Communicator(..., timeout=seconds)``: a collective that does not finish in time ends the job, with a report.

Every rank remembers its last collectives, and a watcher looks at those that run, ten times a second. Shortly before
one runs out of time its rank asks all ranks of the root communicator how far they are, on an MPI communicator of the
watchers' own. A rank that has not started that collective, or does not answer, is missing. At the deadline each rank
that can still speak prints its report, and the job ends.

The watcher is a thread, which answers also while its rank computes or waits inside MPI. Where MPI offers less than
THREAD_MULTIPLE there is none: a rank then watches while it waits for a collective, and `CollectiveTimeout` is raised
in the call that ran out of time.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from commengine.agreement import describe
from commengine.errors import CollectiveError, CollectiveTimeout
from commengine.host.transport import SLEEP_SECONDS
from commengine.job_end import abort, say
from commengine.mpi import load_mpi, ranks_in

if TYPE_CHECKING:
    from mpi4py import MPI

#: how often a rank looks at its collectives, and for messages of the others
TICK_SECONDS = 0.1

#: from the question where everybody is to the deadline; a quarter of a timeout that is shorter than four times this
ASK_SECONDS = 1.0

#: a process that has not looked for so long was suspended
UNSEEN_SECONDS = 1.0

#: from a rank's report to the end of the job: within a look or two the others print theirs
LINGER_SECONDS = 1.5

#: collectives that a report lists
REPORTED = 16

#: missing ranks that a report names one by one
NAMED = 16

#: what a job ends with that ran out of time, as of timeout(1)
EXIT_CODE = 124

_ASKED, _TOLD, _OVER = "asked", "told", "over"


@dataclass(eq=False, slots=True)
class Entry:
    """One collective of this rank. Its times are those of ``time.monotonic``; 0 for one that has not come yet."""

    group: WatchedGroup
    lane: str
    number: int
    operation: str
    about: tuple[Any, ...]  # for `describe`
    peers: tuple[int, ...]  # of a send or receive: ranks of the group
    enqueued: float
    started: float = 0.0
    ended: float = 0.0
    done: Callable[[], bool] | None = None  # asked at every look, where no thread of ours sees the end

    def start(self) -> None:
        """It runs now: its time counts from here."""
        self.started = time.monotonic()
        self.group.started[self.lane] = (self.number, self.operation)
        if not self.group.watch.closed:
            self.group.watch.running[id(self)] = self

    def end(self) -> None:
        """It is done, or has failed."""
        self.ended = time.monotonic()
        self.group.watch.running.pop(id(self), None)

    def __str__(self) -> str:
        where = f"group {self.group.name!r}" + (f", {self.lane}" if self.lane else "")
        if not self.started:
            state = "not started"
        elif not self.ended:
            state = f"running for {time.monotonic() - self.started:.1f} s"
        else:
            state = f"done in {self.ended - self.started:.3g} s"
        return f"#{self.number} {describe(self.operation, *self.about)} of {where}: {state}"


@dataclass(eq=False)
class WatchedGroup:
    """What a watcher knows of one communicator: who is in it, and how far this rank is in each of its lanes.

    key: the same on all ranks of the group, and no other group's. ranks, world_ranks: each member's rank in the root
    communicator and in MPI.COMM_WORLD. A lane is a stream, or "" for the caller's own; its collectives are numbered
    from 1. Sends and receives, which need not be alike on all ranks, have a lane of their own.
    alarms: asked at every look, until the communicator is closed: what has gone wrong elsewhere, or None (NCCL's
    asynchronous errors).
    """

    watch: Watch
    key: str
    name: str
    ranks: tuple[int, ...]
    world_ranks: tuple[int, ...]
    enqueued: dict[str, int] = field(default_factory=dict)
    started: dict[str, tuple[int, str]] = field(default_factory=dict)
    alarms: list[Callable[[], str | None]] = field(default_factory=list)
    splits: int = 0

    def enqueue(
        self, lane: str, operation: str, tensor: Tensor | None = None, redop: str | None = None,
        root: int | None = None, peers: Sequence[int] = (),
    ) -> Entry:  # fmt: skip
        """A new collective, which is to `Entry.start` and `Entry.end`."""
        if peers:
            lane = f"{lane} point to point".strip()
        number = self.enqueued.get(lane, 0) + 1
        self.enqueued[lane] = number
        about = (tensor if tensor is None else _Look(tensor), redop, root, None)
        entry = Entry(self, lane, number, operation, about, tuple(peers), time.monotonic())
        self.watch.entries.append(entry)
        return entry

    def part(self, comm: MPI.Comm, name: str) -> WatchedGroup | None:
        """The group that a split of this one, the same on all its ranks, gave this rank; None once nobody watches."""
        return None if self.watch.closed else self.watch.group(comm, name, f"{self.key}/{self.splits}")


class _Look:
    """Shape, dtype and place of a tensor, without the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.is_cpu = tensor.shape, tensor.dtype, tensor.is_cpu


class Watch:
    """The watcher of a root communicator and of all that is split from it.

    comm: a duplicate of the root's MPI communicator, the watcher's alone, freed by `close`. timeout: seconds.
    Collective, as is `close`.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float) -> None:
        mpi = load_mpi()
        self.timeout = timeout
        self.entries: deque[Entry] = deque(maxlen=REPORTED)
        self.running: dict[int, Entry] = {}
        #: nobody looks any more: what was split from the root and outlives it has no timeout
        self.closed = False
        self._comm = comm
        self._groups: dict[str, WatchedGroup] = {}
        self._told: dict[int, dict[str, Any]] = {}  # by rank: how far it is
        self._asked_for: Entry | None = None  # what the others were asked for
        self._asked_at = 0.0
        self._sent: list[Any] = []
        self._looked = 0.0
        self._before = min(ASK_SECONDS, timeout / 4)
        self._ending = threading.Event()
        self.threaded: bool = mpi.Query_thread() >= mpi.THREAD_MULTIPLE
        self._thread: threading.Thread | None = None
        if self.threaded:
            self._thread = threading.Thread(target=self._serve, name="commengine watch", daemon=True)
            self._thread.start()
            atexit.register(self._stop)  # a thread inside MPI while it is finalised would end in a crash

    def group(self, comm: MPI.Comm, name: str, parent: str = "") -> WatchedGroup:
        """Watch ``comm``, whose ranks are of the root communicator."""
        ranks, world_ranks = (tuple(ranks_in(comm, other)) for other in (self._comm, load_mpi().COMM_WORLD))
        found = WatchedGroup(self, f"{parent}/{name}@{ranks[0]}", name, ranks, world_ranks)
        self._groups[found.key] = found
        return found

    def forget(self, group: WatchedGroup) -> None:
        """The communicator is closed."""
        self._groups.pop(group.key, None)
        group.alarms.clear()  # the last collectives, which reports list, still hold the group

    def close(self) -> None:
        """End the watcher. Collective over the root communicator."""
        self._stop()
        self.closed = True
        self.running.clear()
        atexit.unregister(self._stop)
        if load_mpi().Is_finalized():
            return
        # A message left behind would be received by whichever communicator gets this one's number next. Sends are
        # synchronous: who has none pending any more enters the barrier, and reads until all have.
        barrier = None
        while barrier is None or not barrier.Test():
            self._listen(answer=False)
            self._sent = [request for request in self._sent if not request[0].Test()]
            if barrier is None and not self._sent:
                barrier = self._comm.Ibarrier()
            time.sleep(SLEEP_SECONDS)
        self._comm.Free()

    # Looking --------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._ending.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self) -> None:
        while not self._ending.wait(TICK_SECONDS):
            try:
                self._look()
            except CollectiveTimeout as timeout:
                say(str(timeout))
                time.sleep(LINGER_SECONDS)
                abort(EXIT_CODE)
            except Exception as error:  # of MPI, say: a rank must not go on unwatched and unheard
                say(f"[rank {load_mpi().COMM_WORLD.rank}] the watcher of collectives failed: {error!r}")
                abort(1)

    def look(self) -> None:
        """For a rank without a watcher thread, while it waits: look, if it is time. Raises CollectiveTimeout."""
        if not self.threaded and not self.closed and time.monotonic() - self._looked > TICK_SECONDS:
            self._look()

    def _look(self) -> None:
        """Answer the others, then see whether anything of ours has run out of time."""
        last, self._looked = self._looked, time.monotonic()
        now = self._looked
        over = self._listen()
        for entry in list(self.running.values()):
            if entry.done is not None and entry.done():
                entry.end()
            unseen = now - max(last, entry.started)
            if unseen > UNSEEN_SECONDS:  # this process was suspended: its job, perhaps, with all the others
                entry.started += unseen
        for alarm in [alarm for group in list(self._groups.values()) for alarm in list(group.alarms)]:
            if (problem := alarm()) is not None:
                self._tell_all(_OVER)
                raise CollectiveTimeout(self._report(None, problem))
        oldest = min(list(self.running.values()), key=lambda entry: entry.started, default=None)
        if over is not None:
            raise CollectiveTimeout(self._report(oldest, f"rank {over} has run out of time"))
        if oldest is None:
            return
        left = oldest.started + self.timeout - now
        if left < self._before and self._asked_for is not oldest:
            self._asked_for, self._asked_at = oldest, now
            self._told.clear()
            self._tell_all(_ASKED)
        if left < 0 and now - self._asked_at > self._before / 2:  # else there was no time to answer
            self._tell_all(_OVER)
            raise CollectiveTimeout(self._report(oldest))

    # Telling --------------------------------------------------------------------------------------------------

    def _listen(self, *, answer: bool = True) -> int | None:
        """Read what the others sent; answer. The world rank of one that has run out of time, or None."""
        mpi = load_mpi()
        over, asked, status = None, False, mpi.Status()
        while self._comm.Iprobe(mpi.ANY_SOURCE, mpi.ANY_TAG, status):
            buffer = bytearray(status.Get_count(mpi.BYTE))
            self._comm.Recv([buffer, mpi.BYTE], status.Get_source(), status.Get_tag())
            message = json.loads(buffer)
            self._told[status.Get_source()] = message
            asked |= message["kind"] == _ASKED
            if message["kind"] == _OVER:
                over = int(message["world_rank"])
        if asked and answer:
            self._tell_all(_TOLD)
        return over

    def _tell_all(self, kind: str) -> None:
        mpi = load_mpi()
        groups = list(self._groups.values())
        lanes = {f"{group.key} {lane}": last for group in groups for lane, last in list(group.started.items())}
        peers: dict[str, list[int]] = {}
        for entry in list(self.running.values()):
            peers.setdefault(entry.group.key, []).extend(entry.peers)
        said = {"kind": kind, "world_rank": mpi.COMM_WORLD.rank, "lanes": lanes, "peers": peers}
        message = json.dumps(said).encode()
        self._sent = [request for request in self._sent if not request[0].Test()]
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._sent.append((self._comm.Issend([message, mpi.BYTE], rank), message))

    # Reporting ------------------------------------------------------------------------------------------------

    def _report(self, entry: Entry | None, problem: str = "") -> str:
        """What ``entry`` waits for, or what else is wrong, and this rank's last collectives."""
        rank = load_mpi().COMM_WORLD.rank
        lines = []
        if entry is not None:
            waited = f"after {time.monotonic() - entry.started:.1f} s (timeout {self.timeout:g} s)"
            problem = f"{entry.operation} #{entry.number} of group {entry.group.name!r} is not done {waited}"
            missing = self._missing(entry) or ["nobody, every rank is in it"]
            lines = [f"missing: {who}" for who in missing[:NAMED]]
            if len(missing) > NAMED:
                lines.append(f"missing: {len(missing) - NAMED} more ranks")
        last = [f"  {entry}" for entry in list(self.entries)] or ["  none"]
        return "\n".join([f"[rank {rank}] {problem}", *lines, f"last collectives of rank {rank}:", *last])

    def _missing(self, entry: Entry) -> list[str]:
        """Who has not come to ``entry``, as ``rank R, OPERATION #K`` and how far that rank is."""
        group, found = entry.group, []
        what = f"{entry.operation} #{entry.number}"
        for member in entry.peers or range(len(group.ranks)):
            root_rank, rank = group.ranks[member], group.world_ranks[member]
            if root_rank == self._comm.rank:
                continue
            said = self._told.get(root_rank)
            if said is None:
                found.append(f"rank {rank}, {what} (it does not answer)")
            elif entry.peers:
                if group.ranks.index(self._comm.rank) not in said["peers"].get(group.key, ()):
                    found.append(f"rank {rank}, {what} (it neither sends to this rank nor receives from it)")
            else:
                number, operation = said["lanes"].get(f"{group.key} {entry.lane}", (0, "nothing"))
                if number < entry.number:
                    found.append(f"rank {rank}, {what} (its last there is {operation} #{number})")
                elif number == entry.number and operation != entry.operation:
                    found.append(f"rank {rank}, {what} (it is in {operation} #{number} instead)")
        return found


def check_timeout(timeout: Any) -> None:
    """Raise CollectiveError unless ``timeout`` is None or a positive number of seconds."""
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise CollectiveError(f"timeout={timeout!r} must be a positive number of seconds, or None for no limit")
