"""A launcher as a child process: started with the signals that end it passed on, and watched until it ends."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Self

from commengine.job_end import handle_signal

#: the signals that a batch system or a person sends to stop a run
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: those of them that stay ignored, here and in the child, if they are ignored at the start: SIGHUP is under nohup, and
#: SIGINT in a background job of a shell script
LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)
END_SECONDS = 30.0  # between asking a launcher to end and killing it
LOOK_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


class Signals:
    """Takes the signals that stop a run, in the main thread, and passes them on to the child, if there is one.

    translated: what is sent in place of SIGTERM: the run's ``--exit-signal``, because it asks for the same, and not
    every launcher passes SIGTERM on. A context manager.
    """

    def __init__(self, translated: signal.Signals | None = None) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        #: the last signal that came, or None
        self.received: signal.Signals | None = None
        self._translated = translated
        self._pending: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN or number not in LEFT_IGNORED:
                self._before[number] = handle_signal(number, self._take)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = signal.Signals(number)
        self._pending.append(self.received)
        self.pass_on()

    def pass_on(self) -> None:
        """Send the child each signal that it has not been sent yet, once: a second SIGINT would end it at once."""
        while self._pending and self.child is not None and self.child.poll() is None:
            number = self._pending.pop(0)
            sent = self._translated if number == signal.SIGTERM and self._translated else number
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(sent)

    def sleep(self, seconds: float) -> None:
        """Wait, at most until a signal comes."""
        deadline = time.monotonic() + seconds
        while self.received is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_SECONDS))


def run(words: Sequence[str], signals: Signals, begun: Callable[[], bool], start_seconds: float) -> int | None:
    """Run the launcher and return its status; negative: the number of the signal that killed it.

    begun: whether the run has begun a step. If it has not after ``start_seconds``, the launcher is ended, and None is
    returned: the launcher's status then says only how it answers SIGTERM. The launcher is the head of a process group
    of its own, so that Ctrl-C reaches it once; it gets SIGTERM if this process dies. Raises OSError if it cannot be
    started.
    """
    child = subprocess.Popen(list(words), stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_end_with(os.getpid()))
    signals.child = child
    signals.pass_on()  # what came while the launcher was started
    deadline, late = time.monotonic() + start_seconds, False
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(LOOK_SECONDS)
                return None if late else status
            if deadline < math.inf and begun():
                deadline = math.inf
            if time.monotonic() > deadline:
                said = "no step has begun (--start-minutes): ending the launcher"
                print(f"supervise: {said}", file=sys.stderr, flush=True)
                deadline, late = math.inf, True
                _end(child)
    except BaseException:
        _end(child)
        raise
    finally:
        signals.child = None


def _end(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_SECONDS)
            return


def _end_with(parent: int) -> Callable[[], None] | None:
    """Code for the child that makes it end with its parent; on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)  # loaded here, because the child must do as little as possible

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has died in between
            os._exit(1)

    return ask
