"""Watchers of many ranks in one process, without MPI: what a report costs, and whether each rank's is right.

    python -m tests.commengine.timeout.crowd --ranks 8 64 512

The time of the ranks is not the machine's: every rank looks once in each tenth of a second of theirs, and a message is
there at once. The seconds that are printed are those of this process, for all ranks together.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from commengine.errors import CollectiveTimeout
from commengine.timeout import entries, report, watcher

TIMEOUT = 10.0

#: what happens: all wait for the last rank, which computes; for the first eighth of them, whose node is gone; each even
#: rank for the next one in a group of two; each even rank for a message of the next one; half of them in another
#: collective; all for nobody; and all for nobody, because all hear of a failure elsewhere
CASES = ("one computes", "a node is gone", "pairs", "messages", "halves", "nobody", "alarm")


class Request:
    """A message that is done when it is received."""

    def __init__(self) -> None:
        self.received = False

    def Test(self) -> bool:  # noqa: N802
        return self.received


@dataclass
class Crowd:
    """The ranks' clock, and the messages on their way."""

    size: int
    now: float = 1000.0
    sent: int = 0
    bytes: int = 0
    threads: int = 0
    boxes: list[deque[tuple[int, bytes, Request]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.boxes = [deque() for _ in range(self.size)]

    @contextlib.contextmanager
    def running(self) -> Any:
        """Let the watchers see the crowd's time and messages."""
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _: None)
        mpi = SimpleNamespace(Query_thread=lambda: 0, THREAD_MULTIPLE=3, ANY_SOURCE=-1, ANY_TAG=-1, BYTE=None,
                              Status=lambda: SimpleNamespace())  # fmt: skip
        start = threading.Thread.start

        def counted(thread: threading.Thread) -> None:
            self.threads += 1
            start(thread)

        patches = [mock.patch.object(module, "time", clock) for module in (watcher, entries, report)]
        patches += [
            mock.patch.object(watcher, "load_mpi", return_value=mpi),
            mock.patch.object(watcher, "ranks_in", lambda comm, _: list(comm.ranks)),
            mock.patch.object(watcher, "world_ranks_of", lambda comm: list(comm.ranks)),
            mock.patch.object(threading.Thread, "start", counted),
        ]
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield


class Comm:
    """What a watcher uses of a communicator of MPI."""

    def __init__(self, crowd: Crowd, rank: int, ranks: Any) -> None:
        self.crowd, self.rank, self.ranks, self.size = crowd, rank, ranks, len(ranks)

    def Issend(self, buffer: list[Any], rank: int) -> Request:  # noqa: N802
        request = Request()
        self.crowd.boxes[rank].append((self.rank, buffer[0], request))
        self.crowd.sent += 1
        self.crowd.bytes += len(buffer[0])
        return request

    def Iprobe(self, source: int, tag: int, status: Any) -> bool:  # noqa: N802
        box = self.crowd.boxes[self.rank]
        if box:
            source, message, _ = box[0]
            status.Get_source, status.Get_tag, status.Get_count = lambda: source, lambda: 0, lambda _: len(message)
        return bool(box)

    def Recv(self, buffer: list[Any], source: int, tag: int) -> None:  # noqa: N802
        _, message, request = self.crowd.boxes[self.rank].popleft()
        buffer[0][:] = message
        request.received = True


@dataclass
class Report:
    """What the ranks said, by rank, and what it cost."""

    said: dict[int, str]
    messages: int
    bytes: int
    threads: int
    seconds: float

    def missing(self, rank: int) -> list[str]:
        return re.findall("^missing: (.*)", self.said[rank], re.M)


def run(size: int, case: str, asker_dies: bool = False) -> Report:
    """Let ``size`` ranks run out of time. asker_dies: the first one that asks is gone before it hears an answer."""
    crowd = Crowd(size)
    with crowd.running():
        watches = [watcher.Watch(Comm(crowd, rank, range(size)), TIMEOUT) for rank in range(size)]  # type: ignore[arg-type]
        gone = set(range(size // 8) if case == "a node is gone" else ())
        for rank, watch in enumerate(watches):
            group = watch.group(watch._comm, "world")
            odd = rank % 2 == 1 and case in ("pairs", "messages")
            if case == "pairs":
                pair = range(rank // 2 * 2, rank // 2 * 2 + 2)
                group = watch.group(Comm(crowd, rank, pair), "pair", "pairs")  # type: ignore[arg-type]
            if case == "alarm":
                group.alarms.append(lambda: "the network failed")
            crowd.now += TIMEOUT / 100 / size  # nobody begins at the same moment
            if not odd and rank not in gone and not (case == "one computes" and rank == size - 1):
                if case == "messages":
                    group.enqueue("", "recv", peers=(rank + 1,)).start()
                else:
                    group.enqueue("", "barrier" if case == "halves" and rank >= size // 2 else "all_reduce").start()
        said: dict[int, str] = {}
        began = time.perf_counter()
        while len(said) + len(gone) < size and crowd.now < 1000 + 3 * TIMEOUT:
            for rank, watch in enumerate(watches):
                crowd.now += 1.05 * watcher.TICK_SECONDS / size
                if rank in said or rank in gone:
                    continue
                try:
                    watch.look()
                except CollectiveTimeout as timeout:
                    said[rank] = str(timeout)
                if asker_dies and watch._asked_for is not None:
                    gone.add(rank)
                    asker_dies = False
        return Report(said, crowd.sent, crowd.bytes, crowd.threads, time.perf_counter() - began)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    options.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    return options


def main() -> None:
    """Print a table."""
    given = parser().parse_args()
    print("| case | ranks | messages | a rank | KB | threads | seconds |\n|---|---:|---:|---:|---:|---:|---:|")
    for case in given.cases:
        for size in given.ranks:
            found = run(size, case)
            cells = f"{found.messages:,} | {found.messages / size:.1f} | {found.bytes / 1024:,.1f}"
            print(f"| {case} | {size} | {cells} | {found.threads:,} | {found.seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
