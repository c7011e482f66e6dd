"""Jobs that check a module's operators: a new one goes on where an operator waits for ever, or ends its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.transports.environments import LAUNCHER_VARIABLES, ROOT, end, launcher
from bench.transports.peer_process import LAUNCHERS
from commengine import UsageError

#: for a job to start its ranks and to import what the module needs
START_SECONDS = 120.0
LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Answer:
    """Of a check of an operator on ``ranks`` ranks: "yes", "WRONG", "refused", "hangs", "crashes", or "-" for no check.

    example: of a wrong number, as `bench.conformance.checks.Wrong` has it, else words, or None.
    """

    module: str
    operator: str
    check: str
    ranks: int
    answer: str
    example: Any = None


class _Job:
    """A started job and what its ranks have written."""

    def __init__(self, folder: Path, task: dict[str, Any], ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        clean |= LAUNCHER_VARIABLES | {"OMP_NUM_THREADS": "1"}
        clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [clean.get("PYTHONPATH")])])
        program = [sys.executable, "-m", "bench.conformance.job", str(folder), json.dumps(task)]
        with (folder / "output").open("wb") as log:
            self.process = subprocess.Popen(
                [*launcher(sys.executable, ranks), *program],
                env=clean, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._read = 0

    def close(self) -> None:
        """End it. Ranks that have answered everything end themselves."""
        end(self.process, partial(os.killpg, self.process.pid), 0.5)

    def lines(self, seconds: float) -> Iterator[dict[str, Any]]:
        """What rank 0 writes, until it ends or writes nothing for some seconds: at first for START_SECONDS."""
        limit = START_SECONDS
        last = time.monotonic()
        while time.monotonic() < last + limit:
            ended = self.process.poll() is not None  # looked at before reading: then nothing is missed
            new = self.written(0)[self._read :]
            for line in new:
                self._read += 1
                yield line
            if new:
                last, limit = time.monotonic(), seconds
            elif ended:
                return
            else:
                time.sleep(LOOK_SECONDS)

    def written(self, rank: int) -> list[dict[str, Any]]:
        """The whole lines of a rank."""
        file = self.folder / f"{rank}.jsonl"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def raised(self) -> str | None:
        """The error of a rank for which the others do not know of it, if there is one."""
        for rank in range(self.ranks):
            if (lines := self.written(rank)) and "raised" in lines[-1]:
                return f"rank {rank}: {lines[-1]['raised']}; another rank waits"
        return None

    def last_words(self) -> str:
        """The end of what it printed."""
        return " ".join((self.folder / "output").read_text(errors="replace")[-600:].split())


@contextmanager
def _started(task: dict[str, Any], ranks: int) -> Iterator[_Job]:
    with tempfile.TemporaryDirectory(prefix="bench-adjoints-") as folder:
        job = _Job(Path(folder), task, ranks)
        try:
            yield job
        finally:
            job.close()


def answers(
    module: str,
    ranks: int,
    checks: Sequence[str],
    operators: Sequence[str],
    seconds: float,
    done: Callable[[Answer], object],
) -> list[Answer]:
    """The answers of all cells of a module on so many ranks. Raises UsageError if the module cannot be loaded.

    seconds: after which a check counts as one that waits for ever. done: called with each answer.
    """
    found: list[Answer] = []
    cells: list[tuple[str, str]] = []
    while not cells or len(found) < len(cells):
        task = {"module": module, "checks": list(checks), "operators": list(operators), "first": len(found)}
        before, again, refused = len(found), False, False
        with _started(task, ranks) as job:
            for line in job.lines(seconds):
                if "problem" in line:
                    raise UsageError(f"{module}: {line['problem']}")
                cells = [(operator, check) for operator, check in line.get("cells", cells)]
                if "answer" in line:
                    operator, check = cells[line["cell"]]
                    found.append(Answer(module, operator, check, ranks, line["answer"], line["example"]))
                    refused = refused or line["answer"] == "refused"
                    done(found[-1])
            if not cells:
                raise UsageError(f"{module}: a job on {ranks} ranks said nothing: {job.last_words()}")
            if len(found) == len(cells):
                break
            again = refused and len(found) > before  # see `bench.conformance.job`: out of step since a refusal
            if not again:
                ended = job.process.poll() is not None
                example = job.raised() or (job.last_words() if ended else None)
                answer = "crashes" if ended else "hangs"
                operator, check = cells[len(found)]
                found.append(Answer(module, operator, check, ranks, answer, example))
                done(found[-1])
    return found
