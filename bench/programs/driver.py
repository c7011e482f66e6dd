"""The driver of contestants: it starts all of them, and gives each a turn in every round.

All contestants start and warm up once. In its turn a contestant runs a few steps, while the others block in a read.
bench/programs/serving.py describes the protocol.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from bench.programs.serving import SOCKET
from bench.timing.turns import take_turns
from bench.transports.environments import end, free_port, launcher

START_TIMEOUT_S = 180.0
STEP_TIMEOUT_S = 120.0


class ContestError(RuntimeError):
    """A contestant did not start, died, or failed in a step. The message has the end of its output."""


@dataclass(frozen=True)
class Contestant:
    """A program of ``ranks`` processes, each of which calls `bench.programs.serving.serve`.

    argv: the arguments of the Python interpreter. env: variables added to this process's. mpi: start it with mpiexec.
    python: the interpreter; this process's by default.
    Otherwise each rank is a plain subprocess with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as
    torchrun sets them.
    """

    name: str
    ranks: int
    argv: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    mpi: bool = False
    python: str = sys.executable

    @staticmethod
    def of(
        name: str, ranks: int, module: str, task: str, way: str = "", *, threads: int = 1, mpi: bool = False,
        env: Mapping[str, str] | None = None, python: str = sys.executable,
    ) -> Contestant:  # fmt: skip
        """A contestant that is a module (bench/programs/contestant.py). task: a file; threads: of each rank."""
        argv = ("-m", "bench.programs.contestant", module, task, *([way] if way else []))
        return Contestant(name, ranks, argv, {"OMP_NUM_THREADS": str(threads), **(env or {})}, mpi, python)

    def command(self) -> list[str]:
        python = [self.python, *self.argv]
        return [*launcher(sys.executable, self.ranks), *python] if self.mpi else python


class Running:
    """A started contestant: its processes, a connection to each rank, and all that they have reported."""

    def __init__(self, contestant: Contestant, folder: Path) -> None:
        self.contestant = contestant
        self.name = contestant.name
        self.note = ""
        self.losses: list[float] = []  # of every step since the start, averaged over the ranks
        self.peak_rss_bytes = 0  # summed over the ranks
        self.idle_cpu_s = 0.0  # processor time taken while another contestant was running
        self.idle_wall_s = 0.0
        self._log = folder / f"{self.name}.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pids: list[int] = []
        self._ranks: dict[int, tuple[socket.socket, TextIO]] = {}
        self._failed = False
        try:
            self._start(folder / f"{self.name}.sock")
        except BaseException:
            self.close()
            raise

    def _start(self, path: Path) -> None:
        contestant = self.contestant
        shared = {**os.environ, **contestant.env, SOCKET: str(path)}
        environments = [shared]
        if not contestant.mpi:
            shared |= {"WORLD_SIZE": str(contestant.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
            environments = [shared | {"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(contestant.ranks)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, self._log.open("wb") as log:
            listener.bind(str(path))
            listener.listen(contestant.ranks)
            listener.settimeout(1.0)
            self._processes += [
                subprocess.Popen(
                    contestant.command(), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )
                for environment in environments
            ]  # fmt: skip
            deadline = time.monotonic() + START_TIMEOUT_S
            while len(self._ranks) < contestant.ranks:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    if any(process.poll() not in (None, 0) for process in self._processes):
                        raise self._failure("a process ended") from None
                    if time.monotonic() > deadline:
                        raise self._failure(f"{len(self._ranks)} of {contestant.ranks} ranks connected") from None
                    continue
                lines = connection.makefile("r", encoding="utf-8")
                hello = json.loads(lines.readline())
                self._ranks[hello["rank"]] = connection, lines
                self._pids.append(hello["pid"])
                self.note = hello["note"] if hello["rank"] == 0 else self.note

    def _failure(self, reason: str) -> ContestError:
        self._failed = True
        tail = self._log.read_text(errors="replace")[-4000:]
        return ContestError(f"{self.name}: {reason}\n{' '.join(self.contestant.command())}\n{tail}")

    def run(self, steps: int) -> float:
        """Let the contestant make ``steps`` steps. Returns the slowest rank's seconds per step."""
        for connection, _ in self._ranks.values():
            connection.sendall(f"run {steps}\n".encode())
        answers = self._answers(STEP_TIMEOUT_S * steps)
        losses = zip(*(answer["loss"] for answer in answers), strict=True)
        self.losses += [statistics.fmean(loss) for loss in losses]
        self.peak_rss_bytes = sum(answer["peak_rss_bytes"] for answer in answers)
        slowest: float = max(sum(answer["seconds"]) for answer in answers)
        return slowest / steps

    def _answers(self, timeout: float) -> list[dict[str, Any]]:
        """The answer of every rank. The first failure is reported: after it, other ranks may wait for ever."""
        answers: list[dict[str, Any]] = []
        with selectors.DefaultSelector() as selector:
            for rank, (connection, _) in self._ranks.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            deadline = time.monotonic() + timeout
            while missing := len(self._ranks) - len(answers):
                ready = selector.select(deadline - time.monotonic())
                if not ready:
                    raise self._failure(f"no answer from {missing} ranks")
                for key, _ in ready:
                    line = self._ranks[key.data][1].readline()
                    answer = json.loads(line) if line else {"error": "connection closed"}
                    if "error" in answer:
                        raise self._failure(f"rank {key.data}: {answer['error']}")
                    answers.append(answer)
                    selector.unregister(key.fileobj)
        return answers

    def cpu_seconds(self) -> float:
        """Processor seconds of all ranks and their threads so far; 0 on a system without /proc."""
        total = 0.0
        for pid in self._pids:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total

    def close(self) -> None:
        for connection, _ in self._ranks.values():
            with suppress(OSError):
                connection.sendall(b"quit\n")
        # After a failure the other ranks may wait in a collective for ever, so they cannot be asked to quit.
        orderly = len(self._ranks) == self.contestant.ranks and not self._failed
        for process in self._processes:
            end(process, partial(os.killpg, process.pid), 20.0 if orderly else 0.5)
        for connection, lines in self._ranks.values():
            lines.close()
            connection.close()


@contextmanager
def started(contestants: Sequence[Contestant]) -> Iterator[list[Running]]:
    """Start all contestants and wait until they are set up. They end with the block."""
    with tempfile.TemporaryDirectory(prefix="contest-") as folder, ExitStack() as stack:
        running = []
        for contestant in contestants:
            running.append(Running(contestant, Path(folder)))
            stack.callback(running[-1].close)
        yield running


def rounds(running: Sequence[Running], rounds: int, steps_per_round: int, seed: int = 0) -> dict[str, list[float]]:
    """Let the contestants take turns. Returns each one's seconds per step in every round."""

    def turn(one: Running) -> float:
        others = [other for other in running if other is not one]
        before, start = [other.cpu_seconds() for other in others], time.monotonic()
        seconds = one.run(steps_per_round)
        for other, cpu in zip(others, before, strict=True):
            other.idle_cpu_s += other.cpu_seconds() - cpu
            other.idle_wall_s += time.monotonic() - start
        return seconds

    return take_turns({one.name: partial(turn, one) for one in running}, rounds, seed=seed)
