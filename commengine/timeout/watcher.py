"""The watcher of ``Communicator(..., timeout=seconds)``: a collective that runs too long ends the job, with a report.

Every rank remembers its last collectives, and its watcher looks at those that run, ten times a second. Shortly before
one of them runs out of time, its rank asks all ranks of the root communicator how far they are, on an MPI communicator
of the watchers' own. A rank that has not started that collective, or does not answer, is missing. At the deadline each
rank that can still speak prints its report, tells the ranks that answered, and the job ends. A rank whose last message
has not been received gets no other: MPICH over UCX crashes at the second send to a rank that died.

The watcher is a thread, which also answers while its rank computes or waits inside MPI. If MPI offers less than
THREAD_MULTIPLE there is no thread: a rank then watches while it waits for a collective, and `CollectiveTimeout` is
raised in the call that ran out of time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from commengine.errors import CollectiveError, CollectiveTimeout
from commengine.host.polling import SLEEP_SECONDS
from commengine.job_end import FORWARD_SECONDS, abort, end_waiting_launcher, is_child_of_rank, say
from commengine.mpi import load_mpi, ranks_in, sleep_until_all, world_ranks_of

from .crash import CrashReport
from .entries import Entry, WatchedGroup
from .report import missing_ranks, out_of_time, suspects, write_report

if TYPE_CHECKING:
    from mpi4py import MPI

#: seconds between two looks of a rank at its collectives and at the messages of the other ranks
TICK_SECONDS = 0.1

#: seconds from the question how far the other ranks are to the deadline; a quarter of the timeout if that is shorter
ASK_SECONDS = 1.0

#: what a rank has told so many seconds ago need not be asked again
FRESH_SECONDS = 2 * TICK_SECONDS

#: a process that has not looked for so many seconds was suspended
UNSEEN_SECONDS = 1.0

#: seconds from a rank's report to the end of the job: the other ranks print theirs within a look or two
LINGER_SECONDS = 1.5

#: a message that has not begun after so many seconds never will: Intel's MPI over TCP connects to a dead rank for ever
STUCK_SECONDS = 4.0

#: the number of last collectives that a report lists
REPORTED = 16

#: the exit code of a job that ran out of time; timeout(1) uses the same
EXIT_CODE = 124

#: "last": a question of a rank that closes, after its deadline
_ASKED, _TOLD, _OVER, _LAST = "asked", "told", "over", "last"


#: the watchers whose threads run. A thread that is inside MPI while MPI is finalised crashes
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _program_ends() -> None:
    for watch in [] if is_child_of_rank() else list(_watches):
        watch._stop()


class Watch:
    """The watcher of a root communicator and of all communicators that are split from it.

    comm: a duplicate of the root's MPI communicator, which only the watcher uses; `close` frees it.
    timeout: seconds. Collective to make and to close.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float) -> None:
        mpi = load_mpi()
        self.timeout = timeout
        self.entries: deque[Entry] = deque(maxlen=REPORTED)
        self.running: dict[int, Entry] = {}
        self._closed = False
        self._comm = comm
        self._rank: int = comm.rank
        self._world_ranks = world_ranks_of(comm)
        self._groups: dict[str, WatchedGroup] = {}
        self._told: dict[int, dict[str, Any]] = {}  # the last message of each rank: how far it is, and when it came
        self._unasked: set[int] = set()  # the ranks that are still to be asked, after their last message is received
        self._reachable: list[int] = []  # the ranks that are told that this one has run out of time
        self._asked_for: Entry | None = None  # the collective that the other ranks were asked about
        self._asked_at = 0.0
        self._sent: dict[int, tuple[Any, bytes]] = {}  # by rank: its message that it has not received yet
        self._telling: int | None = None  # the rank to which a message is being sent
        self._looked = 0.0
        self._last = False  # every rank closes this watcher, and asks no more unless the end of the job is decided
        self._before = min(ASK_SECONDS, timeout / 4)
        self._ending = threading.Event()
        #: whether a thread looks. Without it the rank itself looks while it waits
        self.threaded: bool = mpi.Query_thread() >= mpi.THREAD_MULTIPLE
        self._thread: threading.Thread | None = None
        self._crash: CrashReport | None = None
        if self.threaded:
            why = "the crash was in a message to it"
            self._crash = CrashReport(lambda problem: self._report_without_mpi(problem, why))
            self._thread = threading.Thread(target=self._serve, name="commengine watch", daemon=True)
            self._thread.start()
            if not _watches:
                atexit.register(_program_ends)
            _watches.add(self)

    def group(self, comm: MPI.Comm, name: str, parent: str = "") -> WatchedGroup:
        """Watch the communicator ``comm``, whose ranks all belong to the root communicator."""
        ranks = tuple(ranks_in(comm, self._comm))
        world_ranks = tuple(self._world_ranks[rank] for rank in ranks)
        key = f"{parent}@{ranks[0]}"
        found = self._groups[key] = WatchedGroup(key, name, ranks, world_ranks, self.entries, self.running)
        return found

    def split(self, group: WatchedGroup, comm: Any, name: str) -> WatchedGroup | None:
        """Watch ``comm``, a part of ``group``; None once the root is closed.

        Every rank of ``group`` must have counted the split in its ``splits``.
        """
        return None if group.over else self.group(comm, name, f"{group.key}/{group.splits}")

    def forget(self, group: WatchedGroup) -> None:
        """Stop watching ``group``, whose communicator is closed."""
        self._groups.pop(group.key, None)
        group.alarms.clear()  # the last collectives, which reports list, still hold the group

    def close(self) -> None:
        """End the watcher. Collective over the root communicator.

        The caller has an entry that runs, and this call is watched to its end.
        """
        sleep_until_all(self._comm, SLEEP_SECONDS, self.look)
        self._stop()
        self._last, self._asked_for = True, None
        self._leave()
        self._forget_all(left=False)
        self._comm.Free()

    def abandon(self) -> None:
        """End the watcher of a communicator that takes no more calls. Not collective: the other ranks get no answer."""
        self._stop()
        self.drop()

    def drop(self) -> None:
        """End the watcher soon. Waits for nothing."""
        self._ending.set()
        self._forget_all(left=True)

    def _forget_all(self, *, left: bool) -> None:
        """Watch nothing any more: what was split and is still open has no timeout. left: on this rank alone."""
        self._closed = True
        for group in self._groups.values():
            group.over, group.left = True, left
        self.running.clear()
        _watches.discard(self)
        if self._crash is not None:
            self._crash.close()

    def _leave(self) -> None:
        """Wait until every rank has received all messages. Every rank is in `close`.

        A message left behind would be received by the communicator that gets this one's number next. The sends are
        synchronous: a rank whose sends are all received enters the barrier, and reads until all ranks have entered. So
        nobody may ask any more, or answer, unless a rank does not come to the barrier in time: the job then ends.
        """
        barrier = None
        # A rank that has asked while it closes will end the job.
        while barrier is None or self._asked_for is not None or not barrier.Test():
            self._listen()
            if time.monotonic() - self._looked > TICK_SECONDS:
                try:
                    self._look()
                except CollectiveTimeout as timeout:
                    if not self.threaded:
                        raise
                    self._end(timeout)
            self._forget_received()
            if barrier is None and not self._sent:
                barrier = self._comm.Ibarrier()
            time.sleep(SLEEP_SECONDS)

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
                self._end(timeout)
            except Exception as error:  # of MPI, for example: a rank must not go on without its watcher
                say(self._report(None, f"the watcher of collectives failed: {error!r}"))
                abort(1)

    def _end(self, timeout: CollectiveTimeout) -> NoReturn:
        """Print the report and end the job."""
        say(str(timeout))  # before all else: whatever calls MPI now may crash
        with contextlib.suppress(Exception):
            self._tell(_OVER, self._reachable)
        time.sleep(LINGER_SECONDS)
        end_waiting_launcher()
        abort(EXIT_CODE)

    def look(self) -> None:
        """Look if it is time to, on a rank that waits and has no watcher thread. Raises CollectiveTimeout."""
        if not self.threaded and not self._closed and time.monotonic() - self._looked > TICK_SECONDS:
            try:
                self._look()
            except CollectiveTimeout:
                self._tell(_OVER, self._reachable)
                raise

    def _look(self) -> None:
        """Answer the other ranks, then see whether a collective of this rank has run out of time."""
        last, self._looked = self._looked, time.monotonic()
        now = self._looked
        over = self._listen()
        self._update_running(last, now)
        for alarm in [alarm for group in list(self._groups.values()) for alarm in list(group.alarms)]:
            if (problem := alarm()) is not None:
                self._reachable = list(range(self._comm.size))
                raise CollectiveTimeout(self._report(None, problem))
        oldest = min(list(self.running.values()), key=lambda entry: entry.started, default=None)
        if over is not None:
            raise CollectiveTimeout(self._report(oldest, f"rank {over} has run out of time"))
        if oldest is None:
            return
        left = oldest.started + self.timeout - now
        if left < (0 if self._last else self._before):
            if self._asked_for is not oldest:
                self._asked_for, self._asked_at = oldest, now
                self._unasked = set(range(self._comm.size))
                # A rank that asked this one just now has told enough; a message to it may be on its way.
                self._told = {rank: said for rank, said in self._told.items() if now - said["heard"] < FRESH_SECONDS}
            self._unasked -= self._tell(_LAST if self._last else _ASKED, self._unasked)
        if left < 0 and now - self._asked_at > self._before / 2:  # the others have had time to answer
            self._reachable = list(self._told)
            raise CollectiveTimeout(self._report(oldest))

    def _update_running(self, last: float, now: float) -> None:
        """End what the device has finished. If this process was suspended, do not count that time."""
        for entry in list(self.running.values()):
            if entry.done is not None and entry.done():
                entry.end()
            unseen = now - max(last, entry.started)
            if unseen > UNSEEN_SECONDS:  # perhaps the whole job was suspended
                entry.started += unseen

    # Telling --------------------------------------------------------------------------------------------------

    def _listen(self) -> int | None:
        """Read the messages of the other ranks, and answer. Returns the world rank of one that ran out of time."""
        mpi = load_mpi()
        over, asked, status = None, False, mpi.Status()
        while self._comm.Iprobe(mpi.ANY_SOURCE, mpi.ANY_TAG, status):
            buffer = bytearray(status.Get_count(mpi.BYTE))
            self._comm.Recv([buffer, mpi.BYTE], status.Get_source(), status.Get_tag())
            message = json.loads(buffer)
            self._told[status.Get_source()] = message | {"heard": self._looked}
            asked |= message["kind"] == _LAST or (message["kind"] == _ASKED and not self._last)
            if message["kind"] == _OVER:
                over = int(message["world_rank"])
        if asked:
            self._tell(_TOLD, range(self._comm.size))
        return over

    def _tell(self, kind: str, ranks: Iterable[int]) -> set[int]:
        """Send ``ranks`` how far this rank is: in each sequence, and with which peers it exchanges messages.

        A rank that has not received this rank's last message gets none. Returns the ranks that need no other.
        """
        mpi = load_mpi()
        groups = list(self._groups.values())
        sequences = {f"{group.key} {name}": last for group in groups for name, last in list(group.started.items())}
        peers: dict[str, list[int]] = {}
        for entry in list(self.running.values()):
            peers.setdefault(entry.group.key, []).extend(entry.peers)
        said = {"kind": kind, "world_rank": self._world_ranks[self._rank], "sequences": sequences, "peers": peers}
        message = json.dumps(said).encode()
        self._forget_received()
        reached = {self._rank}
        for rank in ranks:
            if rank != self._rank and rank not in self._sent:
                self._telling = rank
                stuck = threading.Timer(STUCK_SECONDS, self._end_stuck)
                stuck.daemon = True
                stuck.start()
                self._sent[rank] = self._comm.Issend([message, mpi.BYTE], rank), message
                stuck.cancel()
                reached.add(rank)
        self._telling = None
        return reached

    def _end_stuck(self) -> None:
        """Report and end this process without a call of MPI: a message of the watcher does not return."""
        say(self._report_without_mpi("the watcher's question to another rank does not return", "the question is to it"))
        time.sleep(FORWARD_SECONDS)
        os._exit(EXIT_CODE)

    def _forget_received(self) -> None:
        self._sent = {rank: sent for rank, sent in self._sent.items() if not sent[0].Test()}

    def _report(self, entry: Entry | None, problem: str = "") -> str:
        """Return the report about ``entry``, the collective that waits, or about another ``problem``."""
        missing = None
        if entry is not None:
            problem, missing = out_of_time(entry, self.timeout), missing_ranks(entry, self._rank, self._told)
        return write_report(self._world_ranks[self._rank], problem, missing, list(self.entries))

    def _report_without_mpi(self, problem: str, why: str) -> str:
        """Return the report without a call of MPI: a thread that crashed or hangs may hold MPI's lock.

        why: what is said of the rank to which this watcher is sending.
        """
        missing = None
        entry = min(list(self.running.values()), key=lambda entry: entry.started, default=None)
        if self._telling is not None:
            missing = [f"rank {self._world_ranks[self._telling]} ({why})"]
        elif entry is not None:
            missing = suspects(entry, self._rank)
        return write_report(self._world_ranks[self._rank], problem, missing, list(self.entries))


def check_timeout(timeout: Any) -> float | None:
    """Return ``timeout`` in seconds. Raises CollectiveError unless it is None or a positive number."""
    if timeout is None:
        return None
    if not (isinstance(timeout, int | float) and timeout > 0):
        raise CollectiveError(f"timeout={timeout!r} must be a positive number of seconds, or None for no limit")
    return float(timeout)
