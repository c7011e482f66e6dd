"""The timeout of a constructor, which begins before the ranks have a communicator of their own, or a watcher.

A rank that waits here polls a non-blocking call on the caller's communicator. The only way to ask there which ranks
have come is a message, and a message could be taken by a receive of the caller from any rank with any tag. So a rank
asks only after its deadline, when the end of the job is decided. Every rank that waits here answers, one without a
timeout, too. Questions and answers are empty, so that a receive that takes one is not overrun; a question that was
received and not answered is asked again.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from commengine.job_end import abort, end_waiting_launcher, say
from commengine.mpi import load_mpi, world_ranks_of

from .crash import CrashReport
from .entries import Entry, WatchedGroup
from .report import missing_ranks, out_of_time, suspects, write_report
from .watcher import EXIT_CODE, LINGER_SECONDS, UNSEEN_SECONDS

if TYPE_CHECKING:
    from mpi4py import MPI

#: seconds between two looks for questions
LOOK_SECONDS = 0.01

#: seconds that a rank waits for answers. A rank that has come answers at its next look, so one that answers later than
#: half of this has come too late
ANSWER_SECONDS = 1.0

#: seconds after which a question that was received without an answer is asked again
AGAIN_SECONDS = 0.1


class Arrival:
    """This rank in a collective constructor over ``comm``, which is the caller's; it calls `look` while it waits.

    what: the constructor's name. name: the group's. timeout: in seconds from now; None: no limit.
    """

    def __init__(self, comm: MPI.Comm, what: str, name: str, timeout: float | None) -> None:
        self._comm, self._what, self._name, self._timeout = comm, what, name, timeout
        self._began = self._looked = time.monotonic()
        mpi = load_mpi()
        largest = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
        self._question, self._answer = largest, largest - 1
        self._answered: list[Any] = []  # the requests of the answers

    def look(self) -> None:
        """Answer the ranks that have run out of time. If this rank has, print the report and end the job."""
        now = time.monotonic()
        unseen = now - self._looked
        if unseen < LOOK_SECONDS:
            return
        self._looked = now
        if unseen > UNSEEN_SECONDS:  # this process was suspended, perhaps the whole job
            self._began += unseen
        self._reply()
        if self._timeout is not None and now - self._began > self._timeout:
            self._end(self._timeout)

    def _received(self, tag: int) -> list[int]:
        """Receive the messages with ``tag``, and return their sources."""
        mpi, sources = load_mpi(), []
        status = mpi.Status()
        while self._comm.Iprobe(mpi.ANY_SOURCE, tag, status):
            sources.append(status.Get_source())
            self._comm.Recv((bytearray(), mpi.BYTE), sources[-1], tag)
        return sources

    def _reply(self) -> None:
        byte = load_mpi().BYTE
        for rank in self._received(self._question):
            self._answered.append(self._comm.Isend((b"", byte), rank, self._answer))

    def _end(self, timeout: float) -> NoReturn:
        comm, ranks = self._comm, tuple(range(self._comm.size))
        world_ranks = tuple(world_ranks_of(comm))
        group = WatchedGroup("", self._name, ranks, world_ranks)
        entry = Entry(group, "life", 1, self._what, None, None, None, (), self._began, self._began)
        here = world_ranks[comm.rank]
        # Whatever calls MPI now may crash, because another rank may be dead.
        CrashReport(lambda problem: write_report(here, problem, suspects(entry, comm.rank), [entry]))
        comm.Set_errhandler(load_mpi().ERRORS_RETURN)  # the caller's could end the process before the report
        told = self._ask(set(ranks) - {comm.rank})
        in_it = {" life": (entry.number, entry.operation)}
        said = {rank: {"sequences": in_it if prompt else {}, "peers": {}} for rank, prompt in told.items()}
        say(write_report(here, out_of_time(entry, timeout), missing_ranks(entry, comm.rank, said), [entry]))
        spoken = time.monotonic()
        while time.monotonic() - spoken < LINGER_SECONDS:  # the others' deadlines come a little later
            with suppress(load_mpi().Exception):
                self._reply()
            time.sleep(LOOK_SECONDS)
        end_waiting_launcher()
        abort(EXIT_CODE)

    def _ask(self, others: set[int]) -> dict[int, bool]:
        """Ask ``others`` whether they are here. Returns for each rank that answers whether it did so at once."""
        mpi, began = load_mpi(), time.monotonic()
        told: dict[int, bool] = {}
        asked: dict[int, tuple[float, Any]] = {}  # when, and the request that is done when the rank has received it
        while (now := time.monotonic()) - began < ANSWER_SECONDS and len(told) < len(others):
            for rank in others - set(told):
                with suppress(mpi.Exception):  # it is dead
                    at, sent = asked.get(rank, (0.0, None))
                    if sent is None or (now - at > AGAIN_SECONDS and sent.Test()):
                        asked[rank] = now, self._comm.Issend((b"", mpi.BYTE), rank, self._question)
            with suppress(mpi.Exception):
                self._reply()
                for rank in self._received(self._answer):
                    told.setdefault(rank, now - began < ANSWER_SECONDS / 2)
            time.sleep(LOOK_SECONDS / 10)
        return told
