"""The parts of ``python -m tests.faults``: modules of tests/faults, each with numbered cases.

A part is a module of tests/faults with these names:

    TITLE: str               its row in the table: what is done to a run or a command
    DEMAND: str              what every case is held to
    CASES: int               how many cases there are, numbered from 0
    SHORT: Sequence[int]     the cases that `make test` runs: few, and a few seconds in all
    LIMIT_S: float           seconds after which a case has failed; may be left out (180)
    LEFT_S: float            seconds in which the processes of a case must end after it; may be left out (15)
    run(case: Case) -> str   run one case and return its outcome in a few words, the same words for what is counted
                             together; any exception is a failure
    why_not() -> str | None  why this machine cannot run the part; may be left out

A case depends on its number alone: it draws from ``case.random``. It leaves no process behind: one that still lives
LEFT_S seconds later is a failure, and is killed. The module is imported in a process of the part's
own, where all of its cases run one after the other (worker.py), and by tests/test_faults.py.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import re
import shutil
import signal
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import mpirun
from tests.support.forking.client import CASE

FOLDER = mpirun.ROOT / "tests" / "faults"
LIMIT_S = 180.0
LEFT_S = 15.0  # the ranks of a killed launcher take some seconds to end


@dataclass(frozen=True)
class Case:
    """One case of a part.

    folder: empty, of this case alone. shared: of all cases of the part while one process runs them; empty at first, for
    what is expensive to make, such as the run that was not disturbed (`tests.support.faults.runs.undisturbed`). In
    `make test` all parts share it. mark: an environment variable of this value is in all processes that the case
    starts.
    """

    part: str
    number: int
    folder: Path
    shared: Path
    left_s: float = LEFT_S
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def random(self) -> random.Random:
        """A generator that the part's name and the number seed; a new one each time."""
        return random.Random(f"{self.part} {self.number}")

    def processes(self, name: str = "") -> list[int]:
        """The ids of the living processes that this case has started, but this one. name: what a command begins with.

        The launcher, its proxies and all ranks of a job on this machine are among them. A command is the name of its
        program, such as hydra_pmi_proxy.
        """
        return [pid for pid, command in self._living() if command.startswith(name[:15])]  # the kernel keeps 15 letters

    def _living(self) -> Iterator[tuple[int, str]]:
        wanted = f"{CASE}={self.mark}".encode()
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not path.name.isdigit() or int(path.name) == os.getpid():
                    continue
                if wanted in _environment(path).split(b"\0"):
                    name, _, after = (path / "stat").read_text().partition("(")[2].rpartition(")")
                    if after.split()[0] not in "ZX":
                        yield int(path.name), name

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """Mark all processes that are started in the block. Raises AssertionError if one of them outlives it."""
        before = os.environ.get(CASE)
        os.environ[CASE] = self.mark
        try:
            yield
            deadline = time.monotonic() + self.left_s
            while (left := list(self._living())) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not left, (
                f"processes outlive the case by {self.left_s:g} s: {', '.join(f'{n} ({p})' for p, n in left)}"
            )
        finally:
            if before is None:
                del os.environ[CASE]
            else:
                os.environ[CASE] = before
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _environment(process: Path) -> bytes:
    """The environment of a process, given as its folder in /proc. Raises OSError for a kernel thread and a zombie.

    A process has none, and no arguments, for a moment in its exec, which may be after Popen has returned.
    """
    deadline = time.monotonic() + 1
    while not (environment := (process / "environ").read_bytes()) and time.monotonic() < deadline:
        (process / "exe").readlink()  # a kernel thread and a zombie have none: OSError, for the caller
        over = (process / "cmdline").read_bytes()
        time.sleep(0.001)
        if over:  # the exec is over, perhaps since the environment was read
            return (process / "environ").read_bytes()
    return environment


@dataclass(frozen=True)
class Outcome:
    """What came of a case: the words of its part, or those of the exception that it raised, and a traceback."""

    passed: bool
    text: str
    details: str
    seconds: float


class Part:
    """The part in the module tests/faults/NAME.py, with the names that the module left out."""

    def __init__(self, name: str) -> None:
        module: Any = importlib.import_module(f"tests.faults.{name}")
        self.name = name
        self.title: str = module.TITLE
        self.demand: str = module.DEMAND
        self.cases: int = module.CASES
        self.short: list[int] = list(module.SHORT)
        self.limit_s: float = getattr(module, "LIMIT_S", LIMIT_S)
        self._left_s: float = getattr(module, "LEFT_S", LEFT_S)
        self._run = module.run
        self._why_not = getattr(module, "why_not", lambda: None)

    def why_not(self) -> str | None:
        """Why this machine cannot run the part, or None if it can."""
        reason: str | None = self._why_not()
        return reason

    def attempt(self, number: int, folder: Path, shared: Path) -> Outcome:
        """Run case ``number``. folder: is made empty first, and removed if the case passes. shared: see `Case`."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shared.mkdir(parents=True, exist_ok=True)
        case = Case(self.name, number, folder, shared, self._left_s)
        began = time.monotonic()
        try:
            with case.marked():
                text = self._run(case)
                if not isinstance(text, str) or not text or "\n" in text:
                    raise TypeError(f"the outcome must be a line of text, not {text!r}")
        except Exception as error:
            said = " ".join(str(error).split())
            text = f"{type(error).__name__}: {said}"[:300]
            return Outcome(False, text, traceback.format_exc(), time.monotonic() - began)
        shutil.rmtree(folder, ignore_errors=True)
        return Outcome(True, text, "", time.monotonic() - began)


def names() -> list[str]:
    """The names of all parts."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if re.fullmatch(r"[a-z]\w*", path.stem))
