"""Jobs of other commands, each with its output in a file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.transports.environments import LAUNCHER_VARIABLES, launcher

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def failed(ranks: int, words: Sequence[str], log: Path, seconds: float) -> str:
    """Run ``python -m WORDS`` on ranks of this machine. Returns the reason why it failed, or nothing.

    log: gets its output. seconds: after which it is ended.
    """
    argv = [*launcher(sys.executable, ranks), sys.executable, "-m", *words]
    with log.open("w") as file:
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False, timeout=seconds,
                env=LAUNCHER_VARIABLES | os.environ | ONE_THREAD,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no end after {seconds:g} s; see {log}"
    last = (log.read_text().strip().splitlines() or ["no output"])[-1]
    return f"status {done.returncode}: {last}; see {log}" if done.returncode else ""
