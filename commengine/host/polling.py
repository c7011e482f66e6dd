"""MPI's blocking calls made of their non-blocking forms, for a thread that must not keep its core while it waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commengine.mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

#: how often a polling thread yields its core before it starts to sleep between polls
YIELDS_BEFORE_SLEEP = 2000
SLEEP_SECONDS = 50e-6

BlockingCall = Callable[..., Any]


class WrappedCalls:
    """The MPI calls that `HostTransport` makes on a communicator, each wrapped in the same way.

    wrap: returns the wrapped form of the blocking call of that name.
    Isend, Irecv: start a message; they never block, and subclasses may replace them.
    """

    def __init__(self, comm: Any, wrap: Callable[[str], BlockingCall]) -> None:
        self.Isend, self.Irecv = comm.Isend, comm.Irecv
        self.Allgather = wrap("Allgather")
        self.Allgatherv = wrap("Allgatherv")
        self.Allreduce = wrap("Allreduce")
        self.Alltoall = wrap("Alltoall")
        self.Alltoallv = wrap("Alltoallv")
        self.Barrier = wrap("Barrier")
        self.Bcast = wrap("Bcast")
        self.Gather = wrap("Gather")
        self.Gatherv = wrap("Gatherv")
        self.Reduce = wrap("Reduce")
        self.Reduce_scatter_block = wrap("Reduce_scatter_block")
        self.Scatter = wrap("Scatter")
        self.Send = wrap("Send")


class PollingCalls(WrappedCalls):
    """The blocking calls of ``comm``, each made of its non-blocking form and a poll that yields the core.

    A blocking MPI call spins on a core. A stream's worker thread would take that core from the computation.

    look: called now and then while waiting, on the waiting thread; what it raises ends the wait.
    """

    def __init__(self, comm: MPI.Intracomm, look: Callable[[], None] | None = None) -> None:
        self._look = look
        super().__init__(comm, lambda name: self._polled(getattr(comm, f"I{name.lower()}")))

    def _polled(self, start: Callable[..., MPI.Request]) -> BlockingCall:
        def call(*args: Any) -> None:
            self.wait(start(*args).Test)

        return call

    def waitall(self, requests: list[MPI.Request], statuses: list[MPI.Status]) -> None:
        """Wait for all of ``requests`` and fill in ``statuses``."""
        testall = load_mpi().Request.Testall
        self.wait(lambda: testall(requests, statuses))

    def wait(self, done: Callable[[], bool]) -> None:
        """Poll until ``done`` returns True."""
        for _ in range(YIELDS_BEFORE_SLEEP):
            if done():
                return
            os.sched_yield()
        while not done():
            time.sleep(SLEEP_SECONDS)
            if self._look is not None:
                self._look()
