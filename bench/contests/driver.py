"""The driver of a contest: it starts the contestants, gives each a turn in every round, and compares within a round.

Machines drift with other tenants and with temperature, so the times of two programs that run one after the other
cannot be compared. Here all contestants start and warm up once. In each round every contestant runs a few steps, in a
new random order, while the others block in a read. Ratios compare two times of one round. bench/contests/serving.py
describes the protocol.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.contests.serving import SOCKET

START_TIMEOUT_S = 180.0
STEP_TIMEOUT_S = 120.0


class ContestError(RuntimeError):
    """A contestant did not start, died, failed in a step, or sent nonsense. The message has the end of its output."""


@dataclass(frozen=True)
class Contestant:
    """A program of ``ranks`` processes, each of which calls `bench.contests.serving.serve`.

    argv: the arguments of the Python interpreter. env: variables added to this process's. mpi: start it with mpiexec.
    Otherwise each rank is a plain subprocess with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as
    torchrun sets them.
    """

    name: str
    ranks: int
    argv: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    mpi: bool = False

    def command(self) -> list[str]:
        python = [sys.executable, *self.argv]
        return [_mpiexec(), "-n", str(self.ranks), *python] if self.mpi else python


def _mpiexec() -> str:
    """The launcher beside this interpreter, where the MPI wheels put it, or the one on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise ContestError("no mpiexec beside the Python interpreter or on PATH")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read(reader: Any) -> Any:
    """The next line of a rank as JSON, as text if it is no JSON, or "" at the end of the connection."""
    line = reader.readline()
    try:
        return json.loads(line)
    except ValueError:
        return line.rstrip("\n")


def _is_answer(answer: Any, steps: int) -> bool:
    """Whether this is an answer of `bench.contests.serving.timed` about ``steps`` steps."""
    if not isinstance(answer, dict) or not isinstance(answer.get("peak_rss_bytes"), int):
        return False
    lists = [answer.get(name) for name in ("seconds", "loss")]
    return all(isinstance(one, list) and len(one) == steps for one in lists)


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
        self._connections: list[socket.socket] = []
        self._readers: list[Any] = []
        self._failed = False
        try:
            self._start(folder / f"{self.name}.sock")
        except BaseException:
            self.close()
            raise

    def _start(self, path: Path) -> None:
        contestant = self.contestant
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, self._log.open("wb") as log:
            listener.bind(str(path))
            listener.listen(contestant.ranks)
            listener.settimeout(1.0)
            shared = {**os.environ, **contestant.env, SOCKET: str(path)}
            if contestant.mpi:
                environments = [shared]
            else:
                group = {"WORLD_SIZE": str(contestant.ranks), "MASTER_ADDR": "127.0.0.1"}
                group["MASTER_PORT"] = str(_free_port())
                environments = [
                    {**shared, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(contestant.ranks)
                ]
            for environment in environments:
                self._processes.append(
                    subprocess.Popen(
                        contestant.command(),
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            by_rank: dict[int, tuple[socket.socket, Any, dict[str, Any]]] = {}
            deadline = time.monotonic() + START_TIMEOUT_S
            while len(by_rank) < contestant.ranks:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    self._check_alive()
                    if time.monotonic() > deadline:
                        raise self._failure(f"{len(by_rank)} of {contestant.ranks} ranks connected") from None
                    continue
                self._connections.append(connection)
                reader = connection.makefile("r", encoding="utf-8")
                hello = _read(reader)
                if not isinstance(hello, dict) or not {"rank", "pid"} <= set(hello) or hello["rank"] in by_rank:
                    raise self._failure(f"unexpected greeting {hello!r}")
                by_rank[hello["rank"]] = (connection, reader, hello)
        ordered = [by_rank[rank] for rank in sorted(by_rank)]
        self._connections = [connection for connection, _, _ in ordered]
        self._readers = [reader for _, reader, _ in ordered]
        self._pids = [hello["pid"] for _, _, hello in ordered]
        self.note = ordered[0][2].get("note", "")

    def _check_alive(self) -> None:
        if any(process.poll() not in (None, 0) for process in self._processes):
            raise self._failure("a process ended")

    def _failure(self, reason: str) -> ContestError:
        self._failed = True
        tail = self._log.read_text(errors="replace")[-4000:]
        return ContestError(f"{self.name}: {reason}\n{' '.join(self.contestant.command())}\n{tail}")

    def run(self, steps: int) -> float:
        """Let the contestant make ``steps`` steps. Returns the slowest rank's seconds per step."""
        for connection in self._connections:
            connection.settimeout(STEP_TIMEOUT_S * steps)
            connection.sendall(f"run {steps}\n".encode())
        answers = self._answers(steps, STEP_TIMEOUT_S * steps)
        losses = zip(*(answer["loss"] for answer in answers), strict=True)
        self.losses += [statistics.fmean(loss) for loss in losses]
        self.peak_rss_bytes = sum(answer["peak_rss_bytes"] for answer in answers)
        slowest: float = max(sum(answer["seconds"]) for answer in answers)
        return slowest / steps

    def _answers(self, steps: int, timeout: float) -> list[dict[str, Any]]:
        """The answer of every rank after ``steps`` steps, in rank order. The first failure is reported."""
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self._connections):
                selector.register(connection, selectors.EVENT_READ, rank)
            deadline = time.monotonic() + timeout
            while len(answers) < len(self._connections):
                ready = selector.select(deadline - time.monotonic())
                if not ready:
                    raise self._failure(f"no answer from {len(self._connections) - len(answers)} ranks")
                for key, _ in ready:
                    rank = key.data
                    answer = _read(self._readers[rank])
                    if answer == "":
                        raise self._failure(f"rank {rank}: connection closed")
                    if isinstance(answer, dict) and "error" in answer:
                        raise self._failure(f"rank {rank}: {answer['error']}")
                    if not _is_answer(answer, steps):
                        raise self._failure(f"rank {rank}: unexpected answer {answer!r}")
                    answers[rank] = answer
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in sorted(answers)]

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
        for connection in self._connections:
            with suppress(OSError):
                connection.sendall(b"quit\n")
        # After a failure the other ranks may wait in a collective for ever, so they cannot be asked to quit.
        orderly = bool(self._readers) and not self._failed
        for process in self._processes:
            self._end(process, 20.0 if orderly else 0.5)
        for reader in self._readers:
            reader.close()
        for connection in self._connections:
            connection.close()

    @staticmethod
    def _end(process: subprocess.Popen[bytes], patience: float) -> None:
        """Wait for a process, then terminate it, then kill it.

        mpiexec ends its ranks, which have process groups of their own.
        """
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                process.wait(patience)
                return
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            patience = 5.0
        process.wait()


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
    """Run the rounds. Returns each contestant's seconds per step in every round. Each round has a new random order."""
    order = list(running)
    shuffle = random.Random(seed).shuffle
    seconds: dict[str, list[float]] = {one.name: [] for one in running}
    for _ in range(rounds):
        shuffle(order)
        for one in order:
            others = [other for other in running if other is not one]
            before, start = [other.cpu_seconds() for other in others], time.monotonic()
            seconds[one.name].append(one.run(steps_per_round))
            for other, cpu in zip(others, before, strict=True):
                other.idle_cpu_s += other.cpu_seconds() - cpu
                other.idle_wall_s += time.monotonic() - start
    return seconds


@dataclass(frozen=True)
class Spread:
    """A median over the rounds, with the smallest and the largest value."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} [{self.low:.{digits}f} to {self.high:.{digits}f}]"


def ratio(seconds: Sequence[float], baseline: Sequence[float]) -> Spread:
    """The time over the baseline's time of the same round. Below 1 is faster than the baseline."""
    return Spread.of([mine / theirs for mine, theirs in zip(seconds, baseline, strict=True)])
