"""What to do when a run has ended: nothing, start it again, start it smaller, or give up."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .command import Position
from .settings import SuperviseSettings

#: the status of a wrong option, and of Ctrl-C
USAGE, INTERRUPTED = 2, 130
#: the statuses of runs that are not started again
_ENDS = {
    0: "the run has ended", os.EX_TEMPFAIL: "the run has stopped before its end; started again, it goes on",
    INTERRUPTED: "the run was interrupted",
}  # fmt: skip
_CRASHES = {
    None: "the run took too long to begin a step (--start-minutes)",
    124: "a collective took too long (status 124)",
}


@dataclass(frozen=True)
class Decision:
    """What is done next, and why. status: the supervisor's own, where nothing is started any more.

    Otherwise the run is started again after ``wait`` seconds; smaller: on the next number of ranks.
    """

    text: str
    status: int | None = None
    wait: float = 0.0
    smaller: bool = False


class Policy:
    """Decides from the ends of one run's starts. `after` is called once for each of them, in order."""

    def __init__(self, settings: SuperviseSettings) -> None:
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
        step, saved = position
        self._began = self._began or step is not None
        if status in _ENDS:
            return Decision(_ENDS[status], status)
        said = _CRASHES.get(status, f"the run crashed (status {status})")
        if status == USAGE and not self._began:
            return Decision(f"the run does not start: {said}", USAGE)
        last, self._last = self._last, position
        self._same = self._same + 1 if last is not None and last.step == step else 1
        self._idle = 1 if last is not None and saved > last.saved else self._idle + 1
        said += " before its first step" if step is None else f" in or after step {step}"
        if self._same > 1:
            said += f", {self._same} times in a row"
        if self._same < self._settings.repeats:
            return self._again(f"{said}; the newest checkpoint is of step {saved}")
        if step is None and smaller:
            self._same = 0
            return Decision(f"{said}: taking fewer ranks", wait=self._wait(), smaller=True)
        return Decision(f"{said}: a restart does not help (--repeats {self._settings.repeats})", 1)

    def after_no_room(self) -> Decision:
        """The decision where too few hosts are there for any size of ``--ranks``."""
        self._idle += 1
        return self._again("too few hosts")

    def _again(self, said: str) -> Decision:
        """Start again, if there are restarts left."""
        most, wait = self._settings.restarts, self._wait()
        if self._restarts >= most:
            return Decision(f"{said}, after {most} restarts (--restarts)", 1)
        self._restarts += 1
        return Decision(f"{said}; restart {self._restarts} of {most} in {wait:g} s", wait=wait)

    def _wait(self) -> float:
        doubled = self._settings.back_off * 2.0 ** min(max(self._idle - 1, 0), 60)
        return min(doubled, self._settings.longest_back_off)
