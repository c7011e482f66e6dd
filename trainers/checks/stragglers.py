"""Which rank keeps the others waiting: each rank's own time in a step, outside of collectives."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from commengine import Communicator
from commengine.trace import Trace

#: how much slower than the median of all ranks a rank is before it is named
SLOW = 1.2


def own_seconds(wall: float, log: Trace) -> float:
    """The seconds of a step, which took ``wall``, in which this rank did not wait in a collective; empties the log.

    A collective of a device counts with the time for which its stream waited.
    """
    waited = sum(event.seconds - event.hidden_seconds for event in log.events)
    log.events.clear()
    return max(0.0, wall - waited)


@dataclass(frozen=True)
class Paces:
    """The ranks' own milliseconds in a step: of the median rank and of the slowest."""

    median_ms: float
    slowest_ms: float
    slowest: int

    @property
    def slow(self) -> bool:
        """Whether one rank keeps the others waiting."""
        return self.slowest_ms > SLOW * self.median_ms

    def row(self) -> dict[str, float | int]:
        """Fields of a row of metrics.jsonl."""
        return {"own_ms": self.median_ms, "slowest_own_ms": self.slowest_ms, "slowest_rank": self.slowest}

    def text(self, host: str) -> str:
        """A line for people. host: of the slowest rank."""
        times = f"{self.slowest_ms:.1f} ms a step outside of collectives, the median rank {self.median_ms:.1f} ms"
        return f"rank {self.slowest} on {host} keeps the others waiting: {times}"


def compare(seconds: float, world: Communicator) -> Paces:
    """Compare the ranks. seconds: of this rank's own in a typical step. Collective over ``world``: 8 bytes a rank."""
    every = torch.zeros(world.size, dtype=torch.float64)
    world.all_gather(every, torch.tensor([1e3 * seconds], dtype=torch.float64))
    values = every.tolist()
    slowest = max(range(world.size), key=values.__getitem__)
    return Paces(statistics.median_low(values), values[slowest], slowest)
