"""Why a study stops: a signal, or its minutes are over. Stopped by a signal, it goes on with the same command."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from commengine import Communicator
from commengine.mpi import load_mpi
from trainers.run import signals

#: the exit status of a study that a signal stopped: start the same command again
AGAIN = os.EX_TEMPFAIL
INTERRUPTED = 130


class Halting:
    """Hears SIGINT and SIGTERM, and counts the seconds of a study over all its calls. A context manager.

    A signal ends all ranks at once, because all that is finished is on the disk; within `between_measurements` it is
    kept, so that the study also writes its page. A second signal always ends at once.

    before: the seconds of the calls before this one. budget: the seconds of the whole study.
    """

    def __init__(self, world: Communicator, before: float, budget: float) -> None:
        self._world, self._before, self._began = world, before, time.monotonic()
        self._budget = budget
        self._kept = False
        self._received = 0
        self._listener = signals.SignalListener(self._hear)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close(ignore=kind is None)

    @property
    def spent(self) -> float:
        """The seconds of the study so far, on this rank's clock."""
        return self._before + time.monotonic() - self._began

    @property
    def left(self) -> float:
        """The seconds of the study that are left; below 0 if it is over time."""
        return self._budget - self.spent

    @contextmanager
    def between_measurements(self) -> Iterator[None]:
        """Keep a signal until `stopped` is asked, instead of ending at once."""
        self._kept = True
        try:
            yield
        finally:
            self._kept = False

    def stopped(self) -> signal.Signals | None:
        """The signal that any rank has heard, on every rank; None if there was none. Collective."""
        number = int(self._world.mpi.allreduce(self._received, load_mpi().MAX))
        return signal.Signals(number) if number else None

    def _hear(self, number: signal.Signals) -> None:
        if self._kept and not self._received:
            self._received = int(number)
            return
        status = INTERRUPTED if number == signal.SIGINT else AGAIN
        signals.say_and_end(f"{number.name}: ended at once; the same command goes on (exit status {status})", status)
