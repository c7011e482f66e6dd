"""How the ranks begin a call together: at MPI's barrier, or at an agreed time of synchronised clocks.

Ranks leave a barrier up to one message's delay apart. Inside a node that is little; between nodes it is as much as a
small collective takes, and what comes early at one rank hides that it set out late at another: a ring of messages then
shows up to two delays where there is one. So between nodes the first rank names a time a little ahead, and each waits
for it on its own clock (Worsch, Reussner & Augustin, On benchmarking collective MPI operations, EuroPVM/MPI 2002;
Hunold & Carpen-Amarie, Reproducible MPI benchmarking is still not as easy as you think, IEEE TPDS 27, 2016).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from commengine.mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

#: between nodes, a call that its ranks began further apart than this share of its time is not counted
MOST_SKEW = 0.05
ROUND_SECONDS = 0.1  # of a contestant between nodes: what a round costs beside its calls is messages, too
SPIN_SECONDS = 5e-4  # before the agreed time: a sleep ends so much too late where another process has the core
DECAY = 0.98  # of what was added to the notice, with every call that no rank was late for
MOST_NOTICE = 16.0  # times the first


class Exchange(Protocol):
    """The two exchanges of numbers that an agreement takes; collective over the group."""

    def largest(self, mine: float) -> float:
        """The largest of all ranks'; no rank has it before all have given theirs."""

    def from_first(self, mine: float) -> float:
        """The first rank's, on every rank."""


class MpiExchange:
    """By MPI."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._max, self._number = comm, load_mpi().MAX, np.zeros(1)
        self._in_place = load_mpi().IN_PLACE

    def largest(self, mine: float) -> float:
        self._number[0] = mine
        self._comm.Allreduce(self._in_place, self._number, self._max)
        return float(self._number[0])

    def from_first(self, mine: float) -> float:
        self._number[0] = mine
        self._comm.Bcast(self._number, 0)
        return float(self._number[0])


@dataclass(frozen=True)
class Clock:
    """This rank's clock within the group. offset: added to it to read the clock that all share. notice: seconds."""

    offset: float
    notice: float

    @staticmethod
    def of(offset: float, delay: float, ranks: int) -> Clock:
        """delay: of one message between two ranks, the longest. The agreed time goes round by a tree of messages."""
        return Clock(offset, (2 + math.ceil(math.log2(max(2, ranks)))) * delay + SPIN_SECONDS)


class AgreedStart:
    """Called before a call by every rank of a group: returns at the same moment on all.

    Where a rank learns of the time too late, the next calls have longer notice; who was late shows in the starts.
    """

    def __init__(
        self,
        clock: Clock,
        exchange: Exchange,
        read: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.clock = clock
        self._notice, self._late = clock.notice, 0.0
        self._exchange, self._read, self._sleep = exchange, read, sleep

    def __call__(self) -> None:
        if self._exchange.largest(self._late) > 0:
            self._notice = min(2 * self._notice, MOST_NOTICE * self.clock.notice)
        else:
            self._notice = max(self.clock.notice, DECAY * self._notice)
        agreed = self._exchange.from_first(self._now() + self._notice)
        left = agreed - self._now()
        self._late = max(0.0, -left)
        if left > SPIN_SECONDS:
            self._sleep(left - SPIN_SECONDS)
        while self._now() < agreed:
            pass

    def _now(self) -> float:
        return self._read() + self.clock.offset


def spans_nodes(comm: MPI.Intracomm) -> bool:
    """Whether the ranks of ``comm`` do not all share a node's memory. Collective."""
    mpi = load_mpi()
    node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    apart = bool(comm.allreduce(node.size < comm.size, mpi.LOR))
    node.Free()
    return apart
