"""A process that runs cases of one part: ``worker.py PART FOLDER DESCRIPTOR``, and the driver's end of it.

It reads the numbers of cases from standard input, one a line, and writes to the file descriptor, as lines of JSON, what
the part is, and then each outcome. So a crash, or a case that cannot be interrupted, ends this process and not the
driver. The output of cases goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
START_S = 120.0
END_S = 2.0  # for a process that runs no case
GRACE_S = 45.0  # for a case to end its processes after its limit


class Worker:
    """The driver's end. ``about``: title, demand, cases, limit_s and why_not of the part.

    Raises RuntimeError if the part cannot be imported.
    """

    def __init__(self, part: str, folder: Path) -> None:
        self.part = part
        mine, theirs = os.pipe()
        self._lines = os.fdopen(mine, "rb", buffering=0)
        self._rest = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.faults.worker", part, str(folder), str(theirs)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=sys.stderr, pass_fds=[theirs], start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        about = self._answer(START_S)
        if about is None:
            self.close()
            raise RuntimeError(f"tests/faults/{part}.py cannot be imported")
        self.about = about

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is there; somebody may have killed it between two cases."""
        return self._process.poll() is None

    def run(self, number: int) -> dict[str, Any] | None:
        """The outcome of a case (`tests.support.faults.parts.Outcome`), or None if the process has died of it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{number}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._answer(self.about["limit_s"] + GRACE_S)

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        while b"\n" not in self._rest:
            ready = select.select([self._lines], [], [], seconds)[0]
            data = self._lines.read(1 << 16) if ready else b""
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process: between cases at once, within a case after it has ended what it started."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
                break
        self._lines.close()


def _interrupt(number: int, frame: object) -> None:
    del frame
    if number == signal.SIGALRM:
        raise TimeoutError("the case's limit is over")
    raise KeyboardInterrupt


def _leave_to_the_driver(number: int, frame: object) -> None:
    """Ctrl-C comes to the driver, too, which then closes this process."""
    del number, frame


def main(name: str, folder: Path, descriptor: int) -> None:
    """Answer until standard input ends."""
    from tests.support.faults.parts import Part

    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)
    signal.signal(signal.SIGINT, _leave_to_the_driver)  # not SIG_IGN, which the programs of a case would inherit
    shared = folder / "shared"
    shutil.rmtree(shared, ignore_errors=True)
    with os.fdopen(descriptor, "w", buffering=1) as answers:
        part = Part(name)
        about = {"title": part.title, "demand": part.demand, "cases": part.cases, "limit_s": part.limit_s}
        answers.write(json.dumps(about | {"why_not": part.why_not()}) + "\n")
        for line in sys.stdin:
            number = int(line)
            signal.setitimer(signal.ITIMER_REAL, part.limit_s)
            outcome = part.attempt(number, folder / f"case-{number}", shared)
            signal.setitimer(signal.ITIMER_REAL, 0)
            answers.write(json.dumps(vars(outcome)) + "\n")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending already


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
