"""MPI's blocking calls made of their non-blocking forms, for a thread that must not keep its core while it waits."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commengine.errors import StoppedError
from commengine.mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

#: how often a polling thread yields its core before it starts to sleep between polls
YIELDS_BEFORE_SLEEP = 2000
SLEEP_SECONDS, LONGEST_SLEEP_SECONDS = 50e-6, 1e-3

#: seconds that a call which is left in the middle waits for the other ranks
LAND_SECONDS = 1.0

#: what the calls held that were left while MPI ran them
_left: list[object] = []

#: the frames of a call, from the one that waits to that of the operation, with room to spare
_FRAMES = 8


class PollingCalls:
    """The blocking calls of ``comm``, each made of its non-blocking form and a poll that yields the core.

    A blocking MPI call spins on a core. A stream's worker thread would take that core from the computation.

    look: called now and then while waiting, on the waiting thread; what it raises ends the wait.
    """

    def __init__(self, comm: MPI.Intracomm, look: Callable[[], None] | None = None) -> None:
        self._comm, self._look = comm, look
        #: why no wait goes on; None: it does
        self.stopped: str | None = None
        self.Isend, self.Irecv = comm.Isend, comm.Irecv  # they never block

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Make the polled form of a blocking call when it is first used."""
        start = getattr(self._comm, f"I{name.lower()}")

        def call(*args: Any) -> None:
            request = None
            try:
                request = start(*args)
                self.wait(request.Test)
            except BaseException as error:
                if request is not None:
                    land(request.Test)
                # All that the call has stays, also what only its own frames hold. A signal may have kept the request.
                if request or (request is None and not isinstance(error, (load_mpi().Exception, OverflowError))):
                    keep(_held())
                raise

        setattr(self, name, call)
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
        nap = SLEEP_SECONDS
        while not done():
            time.sleep(nap)
            nap = min(1.001 * nap, LONGEST_SLEEP_SECONDS)  # a thousandth of the time that it has waited
            if self.stopped is not None:
                raise StoppedError(self.stopped)
            if self._look is not None:
                self._look()


def land(done: Callable[[], bool]) -> None:
    """Give what was left in the middle some time to end: MPI reads and writes its tensors, which the caller has again.

    done: of MPI's requests.
    """
    deadline = time.monotonic() + LAND_SECONDS
    with contextlib.suppress(load_mpi().Exception):
        while not done() and time.monotonic() < deadline:
            time.sleep(SLEEP_SECONDS)


def keep(held: object) -> None:
    """Keep, for the life of the process, what MPI may still read or write."""
    _left.append(held)


def _held() -> list[dict[str, Any]]:
    """Return what the frames of this call hold."""
    frames: list[dict[str, Any]] = []
    frame = inspect.currentframe()
    while frame is not None and len(frames) < _FRAMES:
        frames.append(frame.f_locals)
        frame = frame.f_back
    return frames
