"""How far the clocks of the ranks are apart, so that times taken on different ranks can be compared.

Rank 0 sends a message, the other answers with its clock; that reading belongs to some moment between sending and
receiving, so the clocks' difference lies in an interval as wide as the round trip (Cristian, Probabilistic clock
synchronization, Distributed Computing 3, 1989). It lies in the intervals of all round trips, so in what they have in
common (Marzullo 1984): one message there and one back, of any trips, need to have been quick. Its middle is the offset.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

ROUND_TRIPS = 20


@dataclass(frozen=True)
class Offset:
    """What to add to a rank's clock to read rank 0's, in seconds; true within +-uncertainty."""

    seconds: float
    uncertainty: float

    @staticmethod
    def estimate(trips: Iterable[tuple[float, float, float]]) -> Offset:
        """From (sent, the other's clock, received), one or more; sent and received by rank 0's clock."""
        trips = list(trips)
        low = max(sent - other for sent, other, _ in trips)
        high = min(received - other for _, other, received in trips)
        return Offset((low + high) / 2, abs(high - low) / 2)


def synchronise(
    comm: MPI.Intracomm, round_trips: int = ROUND_TRIPS, clock: Callable[[], float] = time.perf_counter
) -> list[Offset]:
    """Every rank's `Offset` to rank 0's clock, on every rank. Collective; rank 0 speaks with one after another."""
    mine = np.zeros(1)
    offsets = np.zeros((comm.size, 2))
    comm.Barrier()
    if comm.rank == 0:
        for rank in range(1, comm.size):
            trips = []
            for _ in range(round_trips + 1):
                sent = clock()
                comm.Send(mine, rank)
                comm.Recv(mine, rank)
                trips.append((sent, float(mine[0]), clock()))
            found = Offset.estimate(trips[1:])  # the first may have waited for the rank to arrive
            offsets[rank] = found.seconds, found.uncertainty
    else:
        for _ in range(round_trips + 1):
            comm.Recv(mine, 0)
            mine[0] = clock()
            comm.Send(mine, 0)
    comm.Bcast(offsets, 0)
    return [Offset(float(seconds), float(uncertainty)) for seconds, uncertainty in offsets]


def compared(comm: MPI.Intracomm) -> list[Offset]:
    """`synchronise`, or exactly 0 for all where every rank reads one kernel's monotonic clock. Collective.

    A round trip between ranks that share cores takes milliseconds, and says nothing about a clock that is the same.
    """
    if len(set(comm.allgather(_kernel_clock() or f"of rank {comm.rank}"))) == 1:
        return [Offset(0.0, 0.0)] * comm.size
    return synchronise(comm)


def _kernel_clock() -> str | None:
    """What processes have in common whose ``time.perf_counter`` is one clock; None where that is not known."""
    if "CLOCK_MONOTONIC" not in time.get_clock_info("perf_counter").implementation:
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"  # a namespace may shift the clock
    except OSError:
        return None
