"""The offsets between the clocks of the ranks, so that times from different ranks can be compared.

Rank 0 sends a message, and the other rank answers with its clock. That reading belongs to some moment between sending
and receiving, so the difference between the clocks lies in an interval as wide as the round trip (Cristian,
Probabilistic clock synchronization, Distributed Computing 3, 1989). It lies in the intervals of all round trips, and
therefore in their intersection (Marzullo 1984). The intersection is narrow as soon as one message was quick in each
direction, of any round trips. Its middle is the offset.
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
    """The seconds to add to a rank's clock to read rank 0's clock; true within +-uncertainty."""

    seconds: float
    uncertainty: float

    @staticmethod
    def estimate(trips: Iterable[tuple[float, float, float]]) -> Offset:
        """The offset that one or more round trips (sent, the other's clock, received) allow.

        Rank 0's clock has sent and received.
        """
        trips = list(trips)
        low = max(sent - other for sent, other, _ in trips)
        high = min(received - other for _, other, received in trips)
        return Offset((low + high) / 2, abs(high - low) / 2)


def synchronise(
    comm: MPI.Intracomm, round_trips: int = ROUND_TRIPS, clock: Callable[[], float] = time.perf_counter
) -> list[Offset]:
    """The `Offset` of every rank to rank 0's clock, on every rank. Collective; rank 0 asks one rank after another."""
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
    """The result of `synchronise`, or exactly 0 for all ranks if every rank reads one kernel's monotonic clock.

    Collective.

    A round trip between ranks that share cores takes milliseconds, and could not confirm that the clock is the same.
    """
    if len(set(comm.allgather(_kernel_clock() or f"of rank {comm.rank}"))) == 1:
        return [Offset(0.0, 0.0)] * comm.size
    return synchronise(comm)


def _kernel_clock() -> str | None:
    """A name of this process's ``time.perf_counter``, equal for processes with one clock; None if that is not known."""
    if "CLOCK_MONOTONIC" not in time.get_clock_info("perf_counter").implementation:
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"  # a namespace may shift the clock
    except OSError:
        return None
