"""Ending a job: print a last message, then abort every rank of MPI.COMM_WORLD; and which process may do so.

This module imports the standard library alone, because commands use it before the imports that take seconds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

#: seconds that an aborting rank leaves to the launcher to forward its last message. MPICH's launcher kills the rank at
#: once, and without this pause the message is lost
FORWARD_SECONDS = 0.5

#: where launchers tell a task its number in the job
TASK_NUMBERS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")

#: seconds by which the other tasks speak later than the first one, whose words are enough if it ends the job
LATER_SECONDS = 1.0

#: seconds after which a process that waits for the other ranks to start, so that it can end them, ends by SIGALRM
START_SECONDS = 30

#: seconds after which SIGALRM ends a process that cannot abort: nobody reads its output, or the launcher is gone
ABORT_SECONDS = 10

#: Open MPI's launchers. They wait for ever for the daemon of a node that the network does not reach any more
WAITING_LAUNCHERS = ("prterun", "orterun", "mpirun", "mpiexec")

#: seconds that such a launcher has to end the job, and then to end itself after SIGTERM
LAUNCHER_SECONDS = 4.0, 2.0

#: a program that sends a process signals, or prints lines, after so many seconds each, as long as that process is there
_BESIDE = """
import os, sys, time
process, *steps = sys.argv[1:]
for seconds, step in zip(steps[::2], steps[1::2]):
    deadline = time.monotonic() + float(seconds)
    while time.monotonic() < deadline:
        try:
            os.readlink(f"/proc/{process}/exe")  # which an ended process has not, even if nobody waited for it
        except OSError:
            sys.exit()
        time.sleep(0.1)
    if step.isdecimal():
        os.kill(int(process), int(step))
    else:
        os.write(2, step.encode())
"""


#: whether this process is a child that a rank forked: then it is no rank, and what it does is not the job's
_child_of_rank = False


def _forked() -> None:
    global _child_of_rank
    mpi: Any = sys.modules.get("mpi4py.MPI")
    with contextlib.suppress(Exception):  # the fork may come in the middle of the import
        _child_of_rank = _child_of_rank or (mpi is not None and mpi.Is_initialized())


os.register_at_fork(after_in_child=_forked)


def is_child_of_rank() -> bool:
    """Whether a rank of the job forked this process, which shares its memory and must not act in its name."""
    return _child_of_rank


def in_this_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for this process alone: in a child that it forks, which inherits it, it does nothing.

    Whatever is given to `atexit`, or closes what belongs to the job, needs this.
    """
    process = os.getpid()

    @functools.wraps(function)
    def here(*args: Any, **named: Any) -> Any:
        return function(*args, **named) if os.getpid() == process else None

    return here


def handle_signal(number: signal.Signals, handler: Callable[[int, Any], Any]) -> Any:
    """``signal.signal`` for this process alone: in a child that it forks, the signal does what it did before the call.

    Returns the handler before. Call it in the main thread.
    """
    process, before = os.getpid(), signal.getsignal(number)

    def here(number: int, frame: Any) -> None:
        if os.getpid() == process:
            handler(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL if before is None else before)  # None: it is not Python's
            signal.raise_signal(number)

    return signal.signal(number, here)


def end_on_interrupt() -> None:
    """From now on SIGINT ends this job with one line and status 130 while the command's module is being imported.

    Afterwards it raises KeyboardInterrupt, as usual. An exception during imports may be lost, because libraries catch
    what comes while they look for others. An ignored SIGINT stays so. The packages with commands call this.
    """

    def end(number: int, frame: Any) -> None:
        if hasattr(sys.modules["__main__"], "main"):  # the imports are over
            signal.default_int_handler(number, frame)
        say_once_and_abort("interrupted (SIGINT) before the run began", 130)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        handle_signal(signal.SIGINT, end)


def leave_broken_pipe() -> None:
    """Send the rest of standard output nowhere, so that the interpreter's last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Print ``text`` to standard error, if it is still open. Never raises, so that `abort` is always reached."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{text}\n")  # one write: print writes the newline by itself, and lines of ranks would mix
        sys.stderr.flush()


def process_status(code: int) -> int:
    """Return ``code`` as the eight bits of a process's exit status. An error code never becomes 0."""
    return code and (code & 0xFF or 1)


def say_once_and_abort(text: str, code: int) -> NoReturn:
    """`abort` after a line that is printed once for the job, even if all ranks call this. For handlers of signals."""
    if not _child_of_rank and next((os.environ[name] for name in TASK_NUMBERS if name in os.environ), "0") != "0":
        _start_mpi()
        time.sleep(LATER_SECONDS)
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())  # a handler may have interrupted a write to sys.stderr
    abort(code)


def abort(code: int) -> NoReturn:
    """End every rank of MPI.COMM_WORLD now with exit code ``code``, or with 1 if ``code`` would read as success.

    Where a launcher started this process and MPI has not begun, it begins here, which waits for the other ranks. In a
    child that a rank forked, it ends this child alone.
    """
    code = process_status(code) or 1
    with contextlib.suppress(Exception):  # first: a pipe that nobody reads blocks the flush, too
        signal.alarm(ABORT_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a closed stream or a broken pipe must not keep the other ranks waiting
            stream.flush()
    if _child_of_rank:
        os._exit(code)
    _start_mpi()
    time.sleep(FORWARD_SECONDS)
    mpi: Any = sys.modules.get("mpi4py.MPI")
    with contextlib.suppress(
        Exception
    ):  # it may be in the middle of its import; then MPI has begun, and _exit is enough
        if mpi.Is_initialized() and not mpi.Is_finalized():
            signal.alarm(ABORT_SECONDS)
            mpi.COMM_WORLD.Abort(code)
    os._exit(code)


def _start_mpi() -> None:
    """Start MPI in a task of a launcher where it has not begun, because only MPI can end the other tasks.

    If a process ends before MPI_Init, MPICH's launcher ends the others only for a death by a signal, Intel's never, and
    Open MPI's for any status but 0.
    """
    if "mpi4py.MPI" not in sys.modules and any(name in os.environ for name in TASK_NUMBERS):
        with contextlib.suppress(Exception):
            signal.alarm(START_SECONDS)
            importlib.import_module("mpi4py.MPI")


def end_waiting_launcher() -> None:
    """Start a process that ends Open MPI's launcher, if this rank is its child and `abort` does not make it end."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() in WAITING_LAUNCHERS:
            steps = zip(LAUNCHER_SECONDS, (int(signal.SIGTERM), int(signal.SIGKILL)), strict=True)
            beside(parent, *itertools.chain(*steps), stderr=subprocess.DEVNULL, start_new_session=True)


def beside(process: int, *steps: object, **how: Any) -> subprocess.Popen[bytes]:
    """Start a program that sends ``process`` signals or prints lines, and ends when that process does.

    steps: seconds, then the number of a signal or a line, and so on. how: more arguments of `subprocess.Popen`.
    """
    argv = [sys.executable, "-I", "-S", "-c", _BESIDE, str(process), *map(str, steps)]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, **how)
