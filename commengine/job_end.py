"""Ending a job: print a last message, then abort every rank of MPI.COMM_WORLD."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Any, NoReturn

#: seconds that an aborting rank leaves to the launcher to forward its last message. MPICH's launcher kills the rank at
#: once, and without this pause the message is lost
FORWARD_SECONDS = 0.5

#: seconds after which a process that MPI_Abort keeps, because the launcher cannot be reached, ends by SIGALRM
ABORT_SECONDS = 10


def say(text: str) -> None:
    """Print ``text`` to standard error, if it is still open. Never raises, so that `abort` is always reached."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{text}\n")  # one write: print writes the newline by itself, and lines of ranks would mix
        sys.stderr.flush()


def process_status(code: int) -> int:
    """Return ``code`` as the eight bits of a process's exit status. An error code never becomes 0."""
    return code and (code & 0xFF or 1)


def abort(code: int) -> NoReturn:
    """End every rank of MPI.COMM_WORLD now with exit code ``code``, or with 1 if ``code`` would read as success."""
    code = process_status(code) or 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a closed stream or a broken pipe must not keep the other ranks waiting
            stream.flush()
    time.sleep(FORWARD_SECONDS)
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        with contextlib.suppress(Exception):
            signal.alarm(ABORT_SECONDS)
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)
