"""Let calls take turns, and compare the times of one round.

Machines drift with other tenants and with temperature, so the times of two calls that run one after the other cannot
be compared. In each round every call has one turn, in a new random order, and a ratio is of two times of one round.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from commengine import Communicator
from commengine.mpi import load_mpi, reduced


@dataclass(frozen=True)
class Spread:
    """A median over the rounds, with its lower and its upper quartile."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
        return Spread(median, low, high)

    def text(self, digits: int = 2, scale: float = 1.0) -> str:
        """The three numbers, such as "1.20 [1.10 to 1.30]", each multiplied by ``scale``."""
        median, low, high = (f"{scale * one:.{digits}f}" for one in (self.median, self.low, self.high))
        return f"{median} [{low} to {high}]"


def ratio(seconds: Sequence[float], baseline: Sequence[float]) -> Spread:
    """The time over the baseline's time of the same round. Below 1 is faster than the baseline."""
    return Spread.of([mine / theirs for mine, theirs in zip(seconds, baseline, strict=True)])


def take_turns(
    turns: Mapping[str, Callable[[], float]], rounds: int, *, seed: int = 0, warmup: int = 0,
    after: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:  # fmt: skip
    """Give each of ``turns``, which return seconds, one turn in every round. Returns the seconds by name and round.

    seed: of the order in the rounds; on several ranks it is the same on each. warmup: rounds before those that count.
    after: is called after each round.
    """
    order, names = random.Random(seed), list(turns)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        for name in order.sample(names, len(names)):
            took = turns[name]()
            if number >= 0:
                seconds[name].append(took)
        after()
    return seconds


def slowest(world: Communicator, work: Callable[[], object]) -> float:
    """The seconds of ``work`` on the rank where it takes longest, after a barrier. Collective over ``world``."""
    world.mpi.Barrier()
    start = time.perf_counter()
    work()
    took: float = reduced(world.mpi, time.perf_counter() - start, load_mpi().MAX)
    return took
