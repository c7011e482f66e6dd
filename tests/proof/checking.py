"""Builds the model with SPIN, runs it, and reads what it found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .stories import told, wrong

HERE = Path(__file__).resolve().parent
SOURCES = sorted(HERE.glob("*.pml"))
ORDERS = ("x86", "weak")

#: how many steps a search may be deep, and those that are tried first for a story that is short
DEEPEST = 40_000
SHORT = (180, 260, 400, 600)

_NAMES = re.findall(r"^#define (\w+) (\d+)$", (HERE / "names.pml").read_text(), re.MULTILINE)
#: the waits and fences that the model can leave out, with their numbers there
NAMES = {name: int(number) for name, number in _NAMES}
_CODES = re.findall(r"^#define (\w+) (\d+)\b", (HERE / "protocol.pml").read_text(), re.MULTILINE)
#: the numbers of protocol.pml: cells, codes of collectives
NUMBERS = {name: int(number) for name, number in _CODES}


class Setting(NamedTuple):
    """What a run of the model asks; the same as `setting` in protocol.pml."""

    left_out: int = 0
    first: int = 0
    next: int = 0
    calls: int = 2
    most_chunks: int = 3
    differ: int = 0
    death: int = 0
    creation: int = 0


class Found(NamedTuple):
    """What a search found. error: None if it found none. whole: whether it looked at every state."""

    states: int
    depth: int
    seconds: float
    error: str | None
    whole: bool


def missing() -> str | None:
    """Return why the model cannot be checked here, or None."""
    lacking = [name for name in ("spin", "cc", "cpp") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not found (Debian: apt install spin gcc)" if lacking else None


class Model:
    """The model for a number of ranks and an order of memory, compiled in ``folder``.

    traced: each search has a recorded run, whose accesses the model must make. quick: it is compiled in 3 seconds in
    place of 20, and takes 3 times as long.
    """

    def __init__(self, folder: Path, ranks: int, order: str, traced: bool = False, quick: bool = False) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for source in SOURCES:
            shutil.copy(source, folder)
        words = [f"-DRANKS={ranks}", f"-DORDER_{order.upper()}", *(["-DTRACED"] if traced else [])]
        subprocess.run(["spin", *words, "-a", "protocol.pml"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        options = ["-w", "-O0" if quick else "-O2", "-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=4096", "-DMEMLIM=12000"]
        subprocess.run(["cc", *options, "-o", "pan", "pan.c"], cwd=folder, check=True)

    def output(self, setting: Setting, *options: str, seconds: float | None = None, run: Path | str = "") -> str:
        """Run a search, or a replay, and return what it prints. Raises subprocess.TimeoutExpired."""
        asked = {**os.environ, "SETTING": " ".join(map(str, setting)), "RUN": str(run)}
        return subprocess.run(
            ["./pan", *options],
            cwd=self.folder,
            env=asked,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        ).stdout

    def search(self, setting: Setting, depth: int = DEEPEST, seconds: float | None = None) -> Found:
        began = time.monotonic()
        (self.folder / "protocol.pml.trail").unlink(missing_ok=True)
        said = self.output(setting, "-n", f"-m{depth}", "-w22", seconds=seconds)
        error = re.search(r"^pan:1: (.*?)(?: \(at depth \d+\))?$", said, re.MULTILINE)
        states, deep = re.search(r"(\d+) states, stored", said), re.search(r"depth reached (\d+)", said)
        if states is None or deep is None:
            raise RuntimeError(f"the search did not end: {said[-500:]}")
        whole = "max search depth too small" not in said and "out of memory" not in said and error is None
        return Found(int(states[1]), int(deep[1]), time.monotonic() - began, error and error[1], whole)

    def counterexample(self, setting: Setting, seconds: float | None = None) -> tuple[Found, list[str]]:
        """Search for an error, first for one of few steps. Returns what was found last, and the story."""
        for depth in (*SHORT, DEEPEST):
            found = self.search(setting, depth, seconds)
            if found.error is not None:
                return found, list(self.story(setting, found.error))
        return found, []

    def story(self, setting: Setting, error: str) -> Iterator[str]:
        """Tell the error that was found last: which rank did what to which cell, and what was wrong."""
        step, last = 0, ""
        for line in self.output(setting, "-r", "protocol.pml.trail").splitlines():
            words = line.split()
            if words[:1] == ["step"] and line != last:  # a word of the flags is told as a store and as an event
                step, last = step + 1, line
                yield f"{step:3} · {told(*map(int, words[1:]))}"
        yield f"wrong: {wrong(error)}"
