"""What to do when a run has ended: nothing, start it again, start it smaller, or give up."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum, auto

from .command import Position
from .settings import SuperviseConfig

#: the status of a wrong option, of Ctrl-C, of a collective that took too long
USAGE, INTERRUPTED, TIMEOUT = 2, 130, 124


class Action(Enum):
    """What is done next. END: nothing, the run is at its end, or shall not go on now."""

    END = auto()
    AGAIN = auto()
    SMALLER = auto()
    GIVE_UP = auto()


@dataclass(frozen=True)
class Decision:
    """What is done next, why, after how many seconds, and, if nothing is started, the supervisor's own status."""

    action: Action
    text: str
    wait: float = 0.0
    status: int = 0


class Policy:
    """Decides from the ends of one run's starts. `after` is called once for each of them, in order."""

    def __init__(self, settings: SuperviseConfig) -> None:
        self._settings = settings
        self._restarts = 0
        self._last: Position | None = None
        self._same = 0  # crashes in a row at the same step
        self._idle = 0  # crashes in a row without a newer checkpoint
        self._began = False  # whether any start has begun a step

    def after(self, status: int | None, position: Position, *, smaller: bool) -> Decision:
        """The decision after a start that ended.

        status: of the launcher; negative: the number of the signal that killed it; None: the supervisor ended it,
        because it began no step in time. smaller: whether the next size of ``--ranks`` may be taken.
        """
        self._began = self._began or position.step is not None
        if status == 0:
            return Decision(Action.END, "the run has ended")
        if status == os.EX_TEMPFAIL:
            return Decision(Action.END, "the run has stopped before its end; started again, it goes on", status=status)
        if status == INTERRUPTED:
            return Decision(Action.END, "the run was interrupted", status=status)
        how, at = _how(status), _where(position)
        if status == USAGE and not self._began:
            return Decision(Action.GIVE_UP, f"the run does not start: {how}", status=USAGE)
        self._count(position)
        said = f"{how} {at}"
        if self._same > 1:
            said += f", for the {_ordinal(self._same)} time in a row"
        elif self._restarts:
            said += ", not where the last one was"
        if self._same >= self._settings.repeats:
            if position.step is None and smaller:
                self._same = 0
                return Decision(Action.SMALLER, f"{said}: taking fewer ranks", self._wait())
            hint = "a restart does not help" if position.step is not None else "the run does not start"
            return Decision(Action.GIVE_UP, f"{said}: {hint} (--repeats {self._settings.repeats})", status=1)
        if self._restarts >= self._settings.restarts:
            return Decision(Action.GIVE_UP, f"{said}, after {self._restarts} restarts (--restarts)", status=1)
        self._restarts += 1
        wait = self._wait()
        again = f"restart {self._restarts} of {self._settings.restarts} in {wait:g} s"
        return Decision(Action.AGAIN, f"{said}; the newest checkpoint is of step {position.saved}; {again}", wait)

    def after_no_room(self) -> Decision:
        """The decision where too few hosts are there for any size of ``--ranks``."""
        if self._restarts >= self._settings.restarts:
            return Decision(Action.GIVE_UP, f"too few hosts, after {self._restarts} restarts (--restarts)", status=1)
        self._restarts, self._idle = self._restarts + 1, self._idle + 1
        wait = self._wait()
        return Decision(Action.AGAIN, f"too few hosts: asking again in {wait:g} s", wait)

    def _count(self, position: Position) -> None:
        last, self._last = self._last, position
        self._same = self._same + 1 if last is not None and last.step == position.step else 1
        newer = last is not None and position.saved > last.saved
        self._idle = 1 if newer else self._idle + 1

    def _wait(self) -> float:
        doubled = self._settings.back_off * 2.0 ** min(max(self._idle - 1, 0), 60)
        return min(doubled, self._settings.longest_back_off)


def _how(status: int | None) -> str:
    if status is None:
        return "the run took too long to begin a step (--start-minutes)"
    if status < 0:
        return f"the launcher was killed by signal {-status}"
    if status == TIMEOUT:
        return "a collective took too long (status 124)"
    return f"the run crashed (status {status})"


def _where(position: Position) -> str:
    return "before its first step" if position.step is None else f"in or after step {position.step}"


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
