"""Ending a job: last words, then every rank of MPI.COMM_WORLD."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any, NoReturn

#: how long a rank that aborts leaves the launcher to forward its last words: MPICH's kills at once, words and all
FORWARD_SECONDS = 0.5


def say(text: str) -> None:
    """Print to standard error, if there still is one: an error must reach `abort` whatever happened to it."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{text}\n")  # at once: print writes the line's end apart, and ranks' words get mixed
        sys.stderr.flush()


def process_status(code: int) -> int:
    """``code`` as the eight bits that a process ends with, an error never becoming 0."""
    return code and (code & 0xFF or 1)


def abort(code: int) -> NoReturn:
    """End every rank of MPI.COMM_WORLD now, with ``code``, or 1 where that would read as success. Does not return."""
    code = process_status(code) or 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or a broken pipe: no reason to let the others hang
            stream.flush()
    time.sleep(FORWARD_SECONDS)
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)
