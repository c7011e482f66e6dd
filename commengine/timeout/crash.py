"""The last words of a rank that crashes: some MPIs crash the survivors when another rank died or a link failed.

A crash (SIGSEGV, SIGBUS, SIGABRT, SIGFPE or SIGILL) ends a process at once, its watcher included. So two signal
handlers of C code are stacked here: Python's faulthandler writes the stack into a pipe, and then the thread that
crashed sleeps in libc's ``sleep``, which a thread may call at any time. A thread of ours reads the pipe, prints the
report, and lets the signal end the process as it would have. The thread that crashed inside MPI does not hold Python's
lock; one that does hold it keeps the report from being printed, and its process ends after its sleep of 4 to 11 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commengine.job_end import FORWARD_SECONDS, say

#: faulthandler's first line says "Segmentation fault", for example
SIGNALS = {
    signal.SIGILL: "Illegal instruction",
    signal.SIGABRT: "Aborted",
    signal.SIGBUS: "Bus error",
    signal.SIGFPE: "Floating",
    signal.SIGSEGV: "Segmentation fault",
}

#: the longest text of faulthandler that is read, in bytes; a pipe holds as much
LONGEST = 65536

#: at least the size of C's ``struct sigaction``
SIGACTION_BYTES = 512

#: whose handlers are replaced: Open MPI's, MPICH's and UCX's
LIBRARIES = ("libopen-pal", "libopen-rte", "libmpi", "libmpich", "libucs")

_OVER = b"\0"


class CrashReport:
    """Prints ``report(problem)`` if this process crashes, until `close`. Not collective; one at a time in a process.

    report: gets what happened in one line, and returns the report. It must not call MPI.
    It stands back, and does nothing, where somebody else handles these signals (Python's ``-X faulthandler``, a Java
    machine), and where the C library is not glibc. It takes the place of the handlers of MPI's own libraries, which
    print where a process crashed and not in which collective; `close` restores them.
    """

    def __init__(self, report: Callable[[str], str]) -> None:
        self._report = report
        self._pipe: tuple[int, int] | None = None
        self._before: dict[signal.Signals, Any] = {}
        if faulthandler.is_enabled():
            return
        before = _sleep_on_crash()
        if before is None:
            return
        self._pipe, self._before = os.pipe(), before
        os.set_blocking(self._pipe[1], False)  # a thread that crashed must never wait for a reader
        faulthandler.enable(self._pipe[1], all_threads=False)
        forked = weakref.WeakMethod(self._forked)
        os.register_at_fork(after_in_child=lambda: (method := forked()) and method())
        threading.Thread(target=self._wait, args=self._pipe, name="commengine crash", daemon=True).start()

    @property
    def active(self) -> bool:
        """Whether a crash would be reported."""
        return self._pipe is not None

    def close(self) -> None:
        """Restore the signals."""
        if self._pipe is not None:
            self._restore()
            os.write(self._pipe[1], _OVER)
            self._pipe = None

    def _forked(self) -> None:
        """A child of this process crashes by itself."""
        if self._pipe is not None:
            self._restore()
            self._pipe = None

    def _restore(self) -> None:
        faulthandler.disable()
        libc = _libc()
        for number, before in self._before.items():
            libc.sigaction(number, before, None)

    def _wait(self, reading: int, writing: int) -> None:
        said = os.read(reading, LONGEST)
        if said == _OVER:
            os.close(reading)
            os.close(writing)
            return
        time.sleep(0.1)  # faulthandler writes line by line
        os.set_blocking(reading, False)
        with contextlib.suppress(BlockingIOError):  # there was no more
            said += os.read(reading, LONGEST)
        text = said.decode(errors="replace").strip()
        number = next((number for number, name in SIGNALS.items() if name in text.split("\n")[0]), signal.SIGABRT)
        problem = f"crashed ({number.name}). A rank that died or a network that failed makes some MPIs crash the others"
        say(f"{self._report(problem)}\n{text}")
        time.sleep(FORWARD_SECONDS)
        _libc().sysv_signal(number, None)  # the default: it ends the process
        os.kill(os.getpid(), number)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.sysv_signal.restype = ctypes.c_void_p
    libc.sysv_signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.sigaction.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    libc.dladdr.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return libc


def _sleep_on_crash() -> dict[signal.Signals, Any] | None:
    """Let a thread that crashes sleep as many seconds as the signal's number says, once; then the signal ends it.

    Returns what handled the signals before, as C's ``struct sigaction``. Returns None, with nothing changed, if one of
    the signals is handled by anything but a library of MPI.
    """
    try:
        libc = _libc()
        sleep = ctypes.cast(libc.sleep, ctypes.c_void_p)
    except (AttributeError, OSError):
        return None
    before = {number: ctypes.create_string_buffer(SIGACTION_BYTES) for number in SIGNALS}
    for number, action in before.items():
        libc.sigaction(number, None, action)
        handler = ctypes.c_void_p.from_buffer(action).value  # glibc has it first
        if handler and not _is_of_mpi(libc, handler):
            return None
    for number in SIGNALS:
        libc.sysv_signal(number, sleep)
    return before


class _Symbol(ctypes.Structure):
    """C's ``Dl_info``: the library of an address."""

    _fields_ = (
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("address", ctypes.c_void_p),
    )  # fmt: skip


def _is_of_mpi(libc: ctypes.CDLL, address: int) -> bool:
    """Whether the function at ``address`` is in a library of MPI or of UCX."""
    found = _Symbol()
    file = found.file if libc.dladdr(address, ctypes.byref(found)) else None
    return file is not None and Path(os.fsdecode(file)).name.startswith(LIBRARIES)
