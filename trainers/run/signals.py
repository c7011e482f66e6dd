"""Signals that end a run, heard by a thread, and so also while the main thread waits inside MPI.

This module and its imports need the standard library alone, because a command calls `end_on_signals` before the
imports that take seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from commengine.job_end import handle_signal, say_once_and_abort


def parse(name: str) -> signal.Signals:
    """The signal that ``name`` means, such as ``USR1`` or ``SIGUSR1``. Raises KeyError if there is none."""
    return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]


def end_on_signals(arguments: Sequence[str]) -> None:
    """SIGTERM, and the signal that ``arguments`` give to --exit-signal, end this job with status 75.

    A batch system may send its warning as soon as the job starts. The signal's own action would end the job with a
    status that nobody takes for "start it again". A signal that a YAML file names is not known yet.

    Among several tasks of srun SIGTERM ends this one with 143. srun sends it where another task has failed, and
    reports the highest status of all: with 75 a job that always fails would be started again each time.
    """
    by_srun = os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "MPI_LOCALRANKID" not in os.environ
    statuses = {signal.SIGTERM: 128 + signal.SIGTERM if by_srun else os.EX_TEMPFAIL}
    for word, following in pairwise([*arguments, ""]):
        name = following if word == "--exit-signal" else word.partition("--exit-signal=")[2]
        with contextlib.suppress(KeyError):  # the option's own check comes later
            statuses[parse(name)] = os.EX_TEMPFAIL
    statuses.pop(signal.SIGINT, None)
    for number, status in statuses.items():
        text = f"{number.name} before the run began: nothing to save (exit status {status})"
        handle_signal(number, lambda *_, text=text, status=status: say_once_and_abort(text, status))


class SignalListener:
    """Hears SIGTERM, SIGINT and the signals that are added, until `close`.

    A SIGINT that is ignored, as in a background job of a shell script, stays ignored unless it is added.

    at_once: called in the listener's thread with each signal that comes before `hold`, and with a SIGINT that is not
    the first; it ends the process. Outside of the main thread of Python it hears nothing, because only that thread may
    set handlers. A child that the process forks does not listen: it would write into the pipe that its parent reads.
    """

    def __init__(self, at_once: Callable[[signal.Signals], None]) -> None:
        self._at_once = at_once
        self._before: dict[signal.Signals, Any] = {}
        self._holding = False
        self._interrupts = 0
        #: the first signal that came after `hold`, or 0
        self.received = 0
        if threading.current_thread() is not threading.main_thread():
            return
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._woken_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self.add(signal.SIGTERM)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self.add(signal.SIGINT)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        this = weakref.ref(self)

        def forked() -> None:
            if (me := this()) is not None:
                me.close(ignore=False)

        os.register_at_fork(after_in_child=forked)

    def add(self, number: signal.Signals) -> None:
        """Hear ``number``, too."""
        if number not in self._before and threading.current_thread() is threading.main_thread():
            # Python writes the number into the pipe as the signal arrives; the handler itself has nothing to do.
            self._before[number] = signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)  # no system call of a library ends early

    def hold(self) -> None:
        """From now on keep a signal in `received` instead of ending at once."""
        self._holding = True

    def _listen(self) -> None:
        while byte := os.read(self._read, 1):  # nothing is left to read after `close`
            if byte[0] in self._before:
                self._hear(signal.Signals(byte[0]))
        os.close(self._read)

    def _hear(self, number: signal.Signals) -> None:
        self._interrupts += number == signal.SIGINT
        if not self._holding or (number == signal.SIGINT and self._interrupts > 1):
            self._at_once(number)
        self.received = self.received or int(number)

    def close(self, *, ignore: bool) -> None:
        """Stop listening. ignore: the signals are ignored from now on; otherwise what they did before holds again."""
        if not self._before:
            return
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if ignore else before)
        signal.set_wakeup_fd(self._woken_before)
        self._before = {}
        os.close(self._write)
