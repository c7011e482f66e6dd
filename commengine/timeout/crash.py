"""The last words of a rank that crashes: some MPIs crash the survivors when another rank died or a link failed.

A crash (SIGSEGV, SIGBUS, SIGABRT, SIGFPE or SIGILL) ends a process at once, its watcher included. So Python's
faulthandler, which is C code, writes the stack into a pipe, and hands the signal on to libc's ``sleep``, which a thread
may call at any time. While the thread that crashed sleeps there, a thread of ours reads the pipe, prints the report,
and lets the signal end the process. A thread that crashes while it holds Python's lock keeps the report from being
printed; its process ends after the sleep, of as many seconds as the signal's number says (4 to 11).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable

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

_OVER = b"\0"


class CrashReport:
    """Prints ``report(problem)`` if this process crashes, until `close`. Not collective; one at a time in a process.

    report: gets what happened in one line, and returns the report. It must not call MPI.
    It stands back, and does nothing, where somebody else handles these signals: Python's ``-X faulthandler``, a handler
    in Python, a Java machine. It takes the place of the handlers of MPI's own libraries, which print where a process
    crashed and not in which collective; `close` restores them.
    """

    def __init__(self, report: Callable[[str], str]) -> None:
        self._report = report
        self._libc = ctypes.CDLL(None)
        self._before: dict[signal.Signals, int | None] = {}  # the addresses of the handlers whose place is taken
        handled = any(signal.getsignal(number) not in (None, signal.SIG_DFL) for number in SIGNALS)
        if handled or faulthandler.is_enabled() or _java_runs():
            return
        self._libc.sysv_signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._libc.sysv_signal.restype = ctypes.c_void_p
        sleep = ctypes.cast(self._libc.sleep, ctypes.c_void_p)
        self._before = {number: self._libc.sysv_signal(number, sleep) for number in SIGNALS}
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # a thread that crashed must never wait for a reader
        faulthandler.enable(self._writing, all_threads=False)
        os.register_at_fork(after_in_child=self._restore)  # a child crashes by itself
        threading.Thread(target=self._wait, name="commengine crash", daemon=True).start()

    @property
    def active(self) -> bool:
        """Whether a crash would be reported."""
        return bool(self._before)

    def close(self) -> None:
        """Restore the signals."""
        if self.active:
            self._restore()
            self._report = str  # what is called in forked children keeps this, and must not keep a watcher
            os.write(self._writing, _OVER)

    def _restore(self) -> None:
        if self.active:
            faulthandler.disable()
            for number, before in self._before.items():
                self._libc.sysv_signal(number, before)
            self._before = {}

    def _wait(self) -> None:
        said = os.read(self._reading, LONGEST)
        if said == _OVER:
            os.close(self._reading)
            os.close(self._writing)
            return
        time.sleep(0.1)  # faulthandler writes line by line
        os.set_blocking(self._reading, False)
        with contextlib.suppress(BlockingIOError):  # there was no more
            said += os.read(self._reading, LONGEST)
        text = said.decode(errors="replace").strip()
        number = next((number for number, name in SIGNALS.items() if name in text.split("\n")[0]), signal.SIGABRT)
        problem = f"crashed ({number.name}). A rank that died or a network that failed makes some MPIs crash the others"
        say(f"{self._report(problem)}\n{text}")
        time.sleep(FORWARD_SECONDS)
        self._libc.sysv_signal(number, None)  # the default: it ends the process
        os.kill(os.getpid(), number)


def _java_runs() -> bool:
    """Whether a Java machine is in this process: its own work raises these signals."""
    try:
        ctypes.CDLL("libjvm.so", os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False
    return True
