"""CommandJob: one MPI job that runs the command lines of many tests."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support import mpirun


class CommandJob:
    """A job of ``ranks`` ranks that runs command lines (tests/jobs/commands.py); the first of them start it.

    Starting a job takes each rank two seconds, and a run of a tiny model milliseconds. After a crash or a timeout the
    next command lines get a new job.

    folder: a new one, for the files through which the job is asked.
    """

    def __init__(self, folder: Path, ranks: int = 4) -> None:
        self._ranks, self._folder, self._number = ranks, folder, 0
        self._process: subprocess.Popen[str] | None = None
        self._pipes: list[int] = []

    def run(self, runs: list[Any], timeout: float) -> list[Any]:
        """Run command lines and return their outcomes, in the forms of tests/jobs/commands.py.

        timeout: in seconds, for all of them; TimeoutError after it. Raises AssertionError, with the end of what the job
        said, if the job ends before.
        """
        mpirun.require_slow()
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        self._number += 1
        asked, found = (self._folder / f"{self._number}.{name}.json" for name in ("runs", "outcomes"))
        deadline = time.monotonic() + timeout
        try:
            self._ask(asked, runs)
            while not found.exists():
                if (status := self._process.poll()) is not None:
                    said = self._log.read_text(errors="replace")[-4000:]
                    raise AssertionError(f"the job ended early, with status {status}: {said}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"after {timeout:g} s: {self._log.read_text(errors='replace')[-4000:]}")
                time.sleep(0.01)
        except BaseException:
            mpirun.stop(self._process)
            raise
        outcomes: list[Any] = json.loads(found.read_text())
        return outcomes

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _start(self) -> None:
        words = [str(mpirun.JOBS / "commands.py"), str(self._folder), str(self._number + 1)]
        self._close_pipes()
        for rank in range(self._ranks):
            path = self._folder / f"{rank}.asked"
            path.unlink(missing_ok=True)
            os.mkfifo(path)
            self._pipes.append(os.open(path, os.O_RDWR))  # which does not wait for the rank, as O_WRONLY does
        with self._log.open("w") as file:
            self._process = mpirun.start(
                [mpirun.mpiexec(), "-n", str(self._ranks), sys.executable, *words],
                stdout=file.fileno(), stderr=subprocess.STDOUT, fresh=False,
            )  # fmt: skip

    def close(self) -> None:
        """End the job, if it is there."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._ask(self._folder / f"{self._number + 1}.runs.json", None)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                mpirun.stop(self._process)
        self._process = None
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = []

    def _ask(self, path: Path, runs: list[Any] | None) -> None:
        """Give command lines to all ranks; None: the job is to end."""
        _publish(path, runs)
        for pipe in self._pipes:
            os.write(pipe, b"!")


def _publish(path: Path, content: Any) -> None:
    """Write a file of JSON that is there as a whole or not at all."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(content))
    beside.rename(path)
