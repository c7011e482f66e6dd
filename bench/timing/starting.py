"""Let the ranks begin a call together: at MPI's barrier, or at an agreed time of synchronised clocks.

Ranks leave a barrier up to one message's delay apart. Inside a node that is short. Between nodes it is as long as a
small collective, and if one rank starts late, a message that arrives early elsewhere hides it: a ring of messages then
shows up to two delays instead of one. Between nodes the first rank therefore names a time a little ahead, and each
rank waits for this time on its own clock (Worsch, Reussner & Augustin, On benchmarking collective MPI operations,
EuroPVM/MPI 2002; Hunold & Carpen-Amarie, Reproducible MPI benchmarking is still not as easy as you think, IEEE TPDS
27, 2016).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from commengine.mpi import load_mpi, ranks_in

if TYPE_CHECKING:
    from mpi4py import MPI

#: between nodes, a call is not counted if its ranks began further apart than this share of its time
MOST_SKEW = 0.05
ROUND_SECONDS = 0.1  # of a call's turn between nodes, where a round itself costs messages too
SPIN_SECONDS = 5e-4  # spin so long before the agreed time: a sleep ends late if another process has the core
DECAY = 0.98  # of a lengthened notice, after every call for which no rank was late
MOST_NOTICE = 16.0  # times the first


class Numbers(Protocol):
    """The two exchanges of numbers that an agreement needs. Both are collective over the group."""

    def largest(self, mine: float) -> float:
        """The largest number of all ranks. No rank gets it before every rank has given its own."""

    def from_first(self, mine: float) -> float:
        """The first rank's number, on every rank."""


class MpiExchange:
    """The exchanges by MPI."""

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
    """This rank's clock within the group.

    offset: added to this clock to read the clock that all share. notice: seconds between naming a time and that time.
    """

    offset: float
    notice: float

    @staticmethod
    def of(offset: float, delay: float, ranks: int) -> Clock:
        """The clock with the notice that ``ranks`` ranks need: the agreed time goes round by a tree of messages.

        delay: the longest delay of one message between two ranks, in seconds.
        """
        return Clock(offset, (2 + math.ceil(math.log2(max(2, ranks)))) * delay + SPIN_SECONDS)


class AgreedStart:
    """Called by every rank of a group before a call: returns at the same moment on all.

    If a rank learns of the time too late, the next calls have longer notice. The starts of a call show which rank was
    late.
    """

    def __init__(
        self,
        clock: Clock,
        exchange: Numbers,
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
    """Whether the ranks of ``comm`` are on several nodes, without memory in common. Collective."""
    return len(neighbours(comm)[0]) < comm.size


def neighbours(comm: MPI.Intracomm) -> list[list[int]]:
    """For each rank of ``comm`` the ranks of its node, ascending: those that it shares memory with. Collective."""
    node = comm.Split_type(load_mpi().COMM_TYPE_SHARED, comm.rank)
    found = comm.allgather(ranks_in(node, comm))
    node.Free()
    return found
