"""Bring a run to its end over crashes: ``python -m trainers.supervise --ranks 4,2 -- mpirun -n {ranks} python -m ...``.

The command after ``--`` is a launcher with trainers.pretrain_gpt, pretrain_bert or finetune, which has ``--save DIR
--load DIR --save-interval N``. It is started again from its newest checkpoint whenever it crashes, with a limit and
growing waits, and on fewer ranks if hosts are gone. Signals are passed on to the launcher. The status is 0 if the run
has ended, 75 if it was stopped and would go on, 130 after Ctrl-C, 2 for wrong options, and 1 if supervise gave up.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence

from commengine import UsageError
from commengine.errors import one_line
from commengine.options import declared
from commengine.options.declared import require
from commengine.options.ranges import OptionError

from .run.signals import parse
from .supervision import process
from .supervision.command import TrainingCommand
from .supervision.policy import INTERRUPTED, Decision, Policy
from .supervision.settings import Size, SuperviseSettings, living, taken

_NO_COMMAND = "no command: give it after --, as in: supervise --ranks 4,2 -- mpirun -n {ranks} python -m ..."


def say(text: str) -> None:
    """Print a line of the supervisor's own to standard error."""
    print(f"supervise: {text}", file=sys.stderr, flush=True)


def read(argv: Sequence[str]) -> tuple[SuperviseSettings, TrainingCommand]:
    """The options before ``--`` and the command after it.

    Raises OptionError or UsageError, naming what is valid, and SystemExit for --help.
    """
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    settings = declared.parse(SuperviseSettings, words[:at], "supervise")
    settings.validate()
    require(words[at + 1 :], _NO_COMMAND)
    return settings, TrainingCommand(words[at + 1 :], settings)


class Supervisor:
    """Starts the command until it has ended. settings, command: as `read` returns them."""

    def __init__(self, settings: SuperviseSettings, command: TrainingCommand) -> None:
        self._settings, self._command = settings, command
        self._sizes = settings.sizes()
        self._policy = Policy(settings)

    def run(self) -> int:
        """Return the exit status. It must be called in the main thread."""
        named = self._command.exit_signal
        translated = None if named is None else parse(named)
        with process.Signals(translated) as signals:
            while True:
                placed = self._place()
                if (came := signals.received) is not None:  # while the hosts were asked
                    return _between(came)
                decision = self._policy.after_no_room() if placed is None else self._start(*placed, signals)
                say(decision.text)
                if decision.status is not None:
                    self._command.forget_step()
                    return decision.status
                if decision.smaller:
                    self._sizes = self._sizes[1:]
                signals.sleep(decision.wait)
                if signals.received is not None:
                    return _between(signals.received)

    def _start(self, size: Size | None, chosen: dict[str, int], signals: process.Signals) -> Decision:
        """Run the command once, and decide what comes next."""
        command = self._command
        words = command.to_start(size, chosen)
        command.forget_step()
        say(f"starting {shlex.join(words)}")
        status = process.run(words, signals, lambda: command.step() is not None, 60 * self._settings.start_minutes)
        if signals.received is not None and status not in (0, os.EX_TEMPFAIL):
            how = "was ended" if status is None else f"ended with status {status}"
            came = f"{signals.received.name} came, and the launcher {how}"
            return Decision(f"{came}; started again, the run goes on", _stopped(signals.received))
        # with --hosts, the hosts that answer decide the size
        smaller = self._settings.hosts is None and len(self._sizes) > 1
        return self._policy.after(status, command.position(), smaller=smaller)

    def _place(self) -> tuple[Size | None, dict[str, int]] | None:
        """The size of the next start and its hosts; None if too few hosts are there for any size."""
        every = self._settings.host_slots()
        if not every:
            return (self._sizes[0] if self._sizes else None), {}
        there = living(every, self._settings.probe)
        if gone := [host for host in every if host not in there]:
            say(f"no answer from {', '.join(gone)} (--probe)")
        slots = {host: every[host] for host in there}
        size = next((size for size in self._sizes if size.ranks <= sum(slots.values())), None)
        return None if size is None else (size, taken(slots, size.ranks))


def _between(received: signal.Signals) -> int:
    """The status after a signal that came while nothing was running."""
    say(f"{received.name} came between two starts; started again, the run goes on")
    return _stopped(received)


def _stopped(received: signal.Signals) -> int:
    """The status after a signal that did not find the run at a place where it could save."""
    return INTERRUPTED if received == signal.SIGINT else os.EX_TEMPFAIL


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise the command; return the exit status."""
    try:
        settings, command = read(sys.argv[1:] if argv is None else argv)
        return Supervisor(settings, command).run()
    except (OptionError, UsageError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
    except OSError as error:
        print(f"error: the command after -- cannot be started: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
