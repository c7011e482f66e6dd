"""The watcher of ``Communicator(..., timeout=seconds)``: a collective that runs too long ends the job, with a report.

Every rank remembers its last collectives, and its watcher looks at those that run, ten times a second. Shortly before
one of them runs out of time, its rank asks all ranks of the root communicator how far they are, on an MPI communicator
of the watchers' own, and each answers that rank. A rank that has not started that collective, or does not answer, is
missing. At the deadline the rank that asked prints its report, and tells each rank that answered who is missing where
that rank waits; these print theirs, and the job ends. A rank that was asked does not ask for itself meanwhile, and the
ranks ask in turns (`turn_of`), so the number of messages grows with the number of ranks and not with its square.

A rank whose last message has not been received gets no other: MPICH over UCX crashes at the second send to a rank that
died.

The watcher is a thread, which also answers while its rank computes or waits inside MPI. If MPI offers less than
THREAD_MULTIPLE there is no thread: a rank then watches while it waits for a collective, and `CollectiveTimeout` is
raised in the call that ran out of time.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from commengine.errors import CollectiveError, CollectiveTimeout
from commengine.host.polling import SLEEP_SECONDS
from commengine.job_end import FORWARD_SECONDS, abort, end_waiting_launcher, is_child_of_rank, say
from commengine.mpi import load_mpi, ranks_in, sleep_until_all, world_ranks_of

from .entries import Entry, WatchedGroup
from .report import Replies, missing_ranks, out_of_time, where, write_report

if TYPE_CHECKING:
    from mpi4py import MPI

#: seconds between two looks of a rank at its collectives and at the messages of the other ranks
TICK_SECONDS = 0.1

#: seconds from the question how far the other ranks are to the deadline; a quarter of the timeout if that is shorter
ASK_SECONDS = 1.0

#: seconds that the ranks of a turn have to ask, and to be heard, before those of the next turn ask
TURN_SECONDS = 2 * TICK_SECONDS

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
        self._told: dict[int, dict[str, Any]] = {}  # by rank: its answer, how far it is
        self._unasked: set[int] = set()  # the ranks that are still to be asked, after their last message is received
        self._unanswered: set[int] = set()  # the ranks that have asked and are still to be answered
        self._asked_for: Entry | None = None  # the collective that the other ranks were asked about
        self._asked_at = 0.0
        self._heard = -math.inf  # when the last question came
        self._alarmed = math.inf  # when the first alarm was heard
        self._over: dict[str, Any] | None = None  # the message of a rank that has run out of time
        self._farewells: dict[int, dict[str, Any]] = {}  # by rank: what it is told when this one ends the job
        self._sent: dict[int, tuple[Any, bytes]] = {}  # by rank: its message that it has not received yet
        self._telling: tuple[int, float] | None = None  # the rank to which a message is being sent, since when
        self._looked = 0.0
        self._last = False  # every rank closes this watcher, and asks no more unless the end of the job is decided
        self._before = min(ASK_SECONDS, timeout / 4)
        self._patience = self._before + 2 * TURN_SECONDS  # from another rank's question to this rank's own
        self._turn = TURN_SECONDS * turn_of(self._rank, comm.size)
        self._ending = threading.Event()
        #: whether a thread looks. Without it the rank itself looks while it waits
        self.threaded: bool = mpi.Query_thread() >= mpi.THREAD_MULTIPLE
        self._thread: threading.Thread | None = None
        if not faulthandler.is_enabled():  # MPI may crash this rank because another one died: say in which call it was
            faulthandler.enable(2)
        if self.threaded:
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
        self._unanswered.clear()
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
                say(self._report(f"the watcher of collectives failed: {error!r}"))
                abort(1)

    def _end(self, timeout: CollectiveTimeout) -> NoReturn:
        """Print the report and end the job."""
        say(str(timeout))  # before all else: whatever calls MPI now may crash
        with contextlib.suppress(Exception):
            self._send(self._farewells)
        time.sleep(LINGER_SECONDS)
        end_waiting_launcher()
        abort(EXIT_CODE)

    def look(self) -> None:
        """Look if it is time to, on a rank that waits and has no watcher thread. Raises CollectiveTimeout."""
        if not self.threaded and not self._closed and time.monotonic() - self._looked > TICK_SECONDS:
            try:
                self._look()
            except CollectiveTimeout:
                self._send(self._farewells)
                raise

    def _look(self) -> None:
        """Answer the other ranks, then see whether a collective of this rank has run out of time."""
        last, self._looked = self._looked, time.monotonic()
        now = self._looked
        self._listen()
        self._update_running(last, now)
        self._hear_alarms(now)
        oldest = self._oldest()
        over, self._over = self._over, None
        if over is not None:
            raise CollectiveTimeout(self._report_told(oldest, over))
        if oldest is None:
            return
        left = oldest.started + self.timeout - now
        if self._asked_for is not oldest:
            if left > (0 if self._last else self._before) - self._turn or now - self._heard < self._patience:
                return
            self._asked_for, self._asked_at, self._told = oldest, now, {}
            self._unasked = set(range(self._comm.size)) - {self._rank}
        question = {"kind": _LAST if self._last else _ASKED}
        self._unasked -= self._send(dict.fromkeys(self._unasked, question))
        if left < 0 and now - self._asked_at > self._before / 2:  # the others have had time to answer
            answers = Replies(self._told | {self._rank: self._said(oldest)}, self._comm.size)
            self._farewells = {rank: self._farewell(answers.about(rank)) for rank in self._told}
            raise CollectiveTimeout(self._report_told(oldest, answers.about(self._rank)))

    def _hear_alarms(self, now: float) -> None:
        """Raise CollectiveTimeout if something outside of the collectives has failed, and it is this rank's turn."""
        alarms = [alarm for group in list(self._groups.values()) for alarm in list(group.alarms)]
        problem = next((problem for alarm in alarms if (problem := alarm()) is not None), None)
        if problem is None:
            return
        self._alarmed = min(self._alarmed, now)
        if self._over is not None:
            raise CollectiveTimeout(self._report(problem))
        if now - self._alarmed >= self._turn:
            everybody = range(self._comm.size)
            self._farewells = {rank: self._farewell({}) for rank in everybody if rank != self._rank}
            raise CollectiveTimeout(self._report(problem))

    def _oldest(self) -> Entry | None:
        return min(list(self.running.values()), key=lambda entry: entry.started, default=None)

    def _update_running(self, last: float, now: float) -> None:
        """End what the device has finished. If this process was suspended, do not count that time."""
        for entry in list(self.running.values()):
            if entry.done is not None and entry.done():
                entry.end()
            unseen = now - max(last, entry.started)
            if unseen > UNSEEN_SECONDS:  # perhaps the whole job was suspended
                entry.started += unseen

    # Telling --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Read the messages of the other ranks, and answer those that ask."""
        mpi = load_mpi()
        status = mpi.Status()
        while self._comm.Iprobe(mpi.ANY_SOURCE, mpi.ANY_TAG, status):
            buffer = bytearray(status.Get_count(mpi.BYTE))
            source = status.Get_source()
            self._comm.Recv([buffer, mpi.BYTE], source, status.Get_tag())
            message = json.loads(buffer)
            if message["kind"] == _TOLD:
                self._told[source] = message
            elif message["kind"] == _OVER:
                self._over = message
            elif message["kind"] == _LAST or not self._last:
                self._unanswered.add(source)
                self._heard = self._looked
        if self._unanswered:
            self._unanswered -= self._send(dict.fromkeys(self._unanswered, self._said(self._oldest())))

    def _said(self, oldest: Entry | None) -> dict[str, Any]:
        """Return how far this rank is in each sequence, with which peers it exchanges messages, and where it waits."""
        groups = list(self._groups.values())
        sequences = {f"{group.key} {name}": last for group in groups for name, last in list(group.started.items())}
        peers: dict[str, list[int]] = {}
        for entry in list(self.running.values()):
            peers.setdefault(entry.group.key, []).extend(entry.group.ranks[peer] for peer in entry.peers)
        waits = None if oldest is None else where(oldest)
        return {"kind": _TOLD, "sequences": sequences, "peers": peers, "waits": waits}

    def _farewell(self, missing: dict[str, Any]) -> dict[str, Any]:
        return {"kind": _OVER, "world_rank": self._world_ranks[self._rank], **missing}

    def _send(self, messages: Mapping[int, dict[str, Any]]) -> set[int]:
        """Send each rank its message, unless it has not received the last one. Returns the ranks that were sent one."""
        self._forget_received()
        ranks = [rank for rank in messages if rank not in self._sent]
        if ranks:
            done = threading.Event()
            threading.Thread(target=self._end_if_stuck, args=(done,), name="commengine send", daemon=True).start()
            try:
                for rank in ranks:
                    message = json.dumps(messages[rank]).encode()
                    self._telling = rank, time.monotonic()
                    self._sent[rank] = self._comm.Issend([message, load_mpi().BYTE], rank), message
            finally:
                self._telling = None
                done.set()
        return set(ranks)

    def _end_if_stuck(self, done: threading.Event) -> None:
        """Until the messages are sent: report and end this process, without MPI, if one of them does not return."""
        while not done.wait(TICK_SECONDS):
            telling = self._telling
            if telling is not None and time.monotonic() - telling[1] > STUCK_SECONDS:
                missing = [f"rank {self._world_ranks[telling[0]]} (the question is to it)"]
                say(self._report("the watcher's question to another rank does not return", missing))
                time.sleep(FORWARD_SECONDS)
                os._exit(EXIT_CODE)

    def _forget_received(self) -> None:
        self._sent = {rank: sent for rank, sent in self._sent.items() if not sent[0].Test()}

    def _report(self, problem: str, missing: list[str] | None = None) -> str:
        return write_report(self._world_ranks[self._rank], problem, missing, list(self.entries))

    def _report_told(self, entry: Entry | None, told: Mapping[str, Any]) -> str:
        """Return the report about ``entry``, in which this rank waits. told: of `Replies.about`, or a farewell."""
        if entry is not None and told.get("waits") == where(entry):
            return self._report(out_of_time(entry, self.timeout), missing_ranks(entry, self._rank, told["ranks"]))
        return self._report(f"rank {told['world_rank']} has run out of time")


def turn_of(rank: int, size: int) -> int:
    """Return how many turns a rank leaves to others before it asks for all: in turn t about 4^t of ``size`` ranks do.

    So one rank asks, or a few. Neighbours have different turns: where the ranks of a node are gone, others ask early.
    """
    place = (rank * 0x9E3779B1 % 2**32) * size >> 32  # Fibonacci hashing
    return (place.bit_length() + 1) // 2


def check_timeout(timeout: Any) -> float | None:
    """Return ``timeout`` in seconds. Raises CollectiveError unless it is None or a positive number."""
    if timeout is None:
        return None
    if not (isinstance(timeout, int | float) and timeout > 0):
        raise CollectiveError(f"timeout={timeout!r} must be a positive number of seconds, or None for no limit")
    return float(timeout)
