"""Why a run stops before its last step: a signal, or the time. Each rank asks for itself, and `agree` decides."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime
from types import TracebackType
from typing import Self

from commengine import Communicator
from commengine.job_end import say_once_and_abort
from trainers.settings.commands import TrainSettings

from . import signals

#: the exit status of a run that stopped early: started again with ``--load``, it goes on
TEMPORARY = os.EX_TEMPFAIL

#: values of the flag beyond the numbers of signals
DURATION, LIMIT = 1001, 1002

#: seconds that Slurm may take to answer
ASK_SECONDS = 20.0


class StopRequests:
    """Listens for signals and watches the clock, for one command. A context manager; not collective.

    Signals before `begin` end all ranks at once, because there is nothing to save: SIGINT with status 130, others with
    75. From then on they are kept until `reason` is asked for; only a second SIGINT ends all ranks at once. After the
    block the process ignores the signals, so that it ends with its own status; after an exception they do again what
    they did before.
    """

    def __init__(self, world: Communicator) -> None:
        self._rank = world.rank
        self._began = time.monotonic()
        self._stop_at = math.inf  # of the monotonic clock
        self._end_at = math.inf  # of the wall clock
        self._texts = {DURATION: "--exit-duration-in-mins", LIMIT: "--exit-before-limit"}
        self._training = False
        self._listener = signals.SignalListener(self._at_once)
        #: whether `forget` was called: the run that was under way ended as usual, and no other one should begin
        self.forgot = False
        #: the end time of the job, found by `configure` on rank 0, for people; None if there is none
        self.limit: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close(ignore=kind is None)

    def configure(self, config: TrainSettings) -> None:
        """Take over ``--exit-signal``, ``--exit-duration-in-mins`` and ``--exit-before-limit``. config: valid."""
        if config.exit_signal is not None:
            self._listener.add(signals.parse(config.exit_signal))
        if config.exit_duration_in_mins is not None:
            self._stop_at = self._began + 60 * config.exit_duration_in_mins
            self._texts[DURATION] = f"--exit-duration-in-mins {config.exit_duration_in_mins:g}"
        if self._rank == 0 and config.save is not None and config.exit_before_limit:
            end, source = job_end_time(os.environ)
            if end is not None:
                # In a job that is shorter, half of its time goes to training.
                seconds = min(config.exit_before_limit, max(0.0, (end - time.time()) / 2))
                self._end_at = end - seconds
                when = datetime.fromtimestamp(end).isoformat(" ", "seconds")
                before = f"{seconds:.0f} s before it"
                self.limit = f"the job's time limit is {when} ({source}): the run saves and stops {before}"
                self._texts[LIMIT] = f"--exit-before-limit {config.exit_before_limit:g}"

    def begin(self) -> None:
        """From now on there is something to save."""
        self._listener.hold()
        self._training = True

    def reason(self) -> int:
        """Why this rank would stop: the number of a signal, DURATION, LIMIT, or 0."""
        if self._listener.received:
            return self._listener.received
        if time.monotonic() >= self._stop_at:
            return DURATION
        return LIMIT if time.time() >= self._end_at else 0

    def text(self, reason: int) -> str:
        """A reason for people."""
        return self._texts[reason] if reason in self._texts else signal.Signals(reason).name

    def forget(self) -> None:
        """Leave out of account everything that asked for a stop so far, and the time."""
        self.forgot = True
        self._listener.received = 0
        self._stop_at = self._end_at = math.inf

    def _at_once(self, number: signal.Signals) -> None:
        status = 130 if number == signal.SIGINT else TEMPORARY
        if self._training:
            text = f"interrupted again ({number.name}): ended at once, the last checkpoint is as it was"
        else:
            text = f"{number.name} before the first step: ended at once, nothing to save (exit status {status})"
        say_once_and_abort(text, status)


def job_end_time(environ: Mapping[str, str]) -> tuple[float | None, str]:
    """When the batch system will end this job, in seconds since 1970, and who says so; None if nobody does.

    Slurm 23.02 and newer sets SLURM_JOB_END_TIME. An older one is asked with ``squeue``.
    """
    name = "SLURM_JOB_END_TIME"
    if name in environ:
        with contextlib.suppress(ValueError):
            return float(environ[name]), name
    job = environ.get("SLURM_JOB_ID")
    squeue = shutil.which("squeue", path=environ.get("PATH"))
    if job is None or squeue is None:
        return None, ""
    asked = [squeue, "--noheader", "--jobs", job, "--format=%e"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):  # "N/A": there is no limit
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=ASK_SECONDS, check=True, env=dict(environ), process_group=0
        )
        return datetime.fromisoformat(done.stdout.strip()).timestamp(), "squeue"
    return None, ""
