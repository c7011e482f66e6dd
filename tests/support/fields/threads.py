"""Many ranks in one process, a thread each, for layers on grids that no machine of a test has."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch

#: after so long a rank that waits for another one fails
SECONDS = 60


class ThreadRank:
    """The part of a Communicator that layers on fields use. sent: its messages, by the rank that they go to."""

    name, checked, order = "threads", False, None

    def __init__(self, ranks: list["ThreadRank"], size: int, barrier: threading.Barrier) -> None:
        self.rank, self.size, self._ranks, self._barrier = len(ranks), size, ranks, barrier
        self._boxes = [SimpleQueue[torch.Tensor]() for _ in range(size)]
        self._given = torch.empty(0)
        self.sent: Counter[int] = Counter()
        self.kept: dict[str, Any] = {}

    def compare(self, words: str, problem: str | None = None) -> None:
        assert problem is None, problem

    def extremes(self, numbers: list[int]) -> tuple[list[int], list[int]]:
        return numbers, numbers

    def exchange(self, sends: Any, receives: Any, *, stream: Any = None) -> Any:
        def start() -> Any:
            for tensor, peer in sends:
                self.sent[peer] += 1
                self._ranks[peer]._boxes[self.rank].put(tensor.clone())
            for tensor, peer in receives:
                tensor.copy_(self._boxes[peer].get(timeout=SECONDS))
            return SimpleNamespace(wait=lambda: None)

        return SimpleNamespace(start=start)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        self._given = tensor.clone()
        self._barrier.wait(SECONDS)
        every = torch.stack([one._given for one in self._ranks])
        self._barrier.wait(SECONDS)
        tensor.copy_(getattr(torch, {"sum": "sum", "min": "amin", "max": "amax"}[op])(every, 0))


def on_threads(size: int, program: Callable[[ThreadRank], Any]) -> list[Any]:
    """Return what ``program`` returns on each of ``size`` ranks."""
    ranks: list[ThreadRank] = []
    barrier = threading.Barrier(size)
    for _ in range(size):
        ranks.append(ThreadRank(ranks, size, barrier))
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(program, ranks))
