"""The states of a machine: under a running program its memory may become faster or slower as a whole.

Virtual cores move between real ones. On one machine a message of 8 bytes took 1.05 us or 1.4 us, one of 1 KB 1.6 or 3.0
us and one of 1 MB 72 or 280 us, for seconds to minutes. A ratio of two times means something only if both were measured
in one state. So a bench sends small messages before and after each turn. A turn in which their time changed is measured
again, and each turn is counted for its state.

Messages of 8 bytes tell the states apart: their time does not depend on what the turn left in the caches. Messages of
1 KB go before them, to warm up, and their time is shown, too.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from commengine.mpi import load_mpi, reduced

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

PROBE_BYTES = (1024, 8)
PROBE_CALLS = 31
#: two probes are of one state if their times differ by less than this factor
SAME = 1.15
#: a turn is measured again at most this often
MOST_AGAIN = 4
#: a state with less than this share of the turns is a disturbance: the bench says so, but shows no table for it
LEAST_SHARE = 0.05


@dataclass
class State:
    """One state. probes: the times of 8 bytes in it, in seconds; longer: the same for 1 KB."""

    probes: list[float] = field(default_factory=list)
    longer: list[float] = field(default_factory=list)

    @property
    def centre(self) -> float:
        """The median time of 8 bytes."""
        return statistics.median(self.probes)


class States:
    """Knows the state of the machine at each turn of a bench. Making it, and `turn`, are collective over ``comm``.

    probe: the seconds of a message of 8 bytes and of one of 1 KB, equal on all ranks; None: all-reduces over ``comm``.
    Ranks that have no core of their own, or are on several nodes, cannot tell a state: they take every turn as it is.
    """

    def __init__(self, comm: MPI.Intracomm, probe: Callable[[], tuple[float, float]] | None = None) -> None:
        self._comm = comm
        self._buffers = [np.zeros(nbytes // 8) for nbytes in PROBE_BYTES]
        mpi = load_mpi()
        node = comm.Split_type(mpi.COMM_TYPE_SHARED)
        mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        cores = len(set().union(*node.allgather(list(mine))))  # a launcher may have bound each rank to its own
        self.known = bool(reduced(comm, node.size == comm.size <= cores and comm.size > 1, mpi.MIN))
        node.Free()
        self._probe = probe or self._message
        self._last: tuple[float, float] | None = None
        self.all: list[State] = []  # in the order in which they were seen
        self._part_of: dict[int, int] = {}
        self.again = 0  # turns that were measured again

    def turn(self, run: Callable[[], T]) -> tuple[T, int]:
        """Run a turn, again if the state changed meanwhile. Returns its result, and the number of its state."""
        if not self.known:
            return run(), 0
        before = self._last or self._probe()
        for attempt in range(MOST_AGAIN + 1):
            result = run()
            self._last = after = self._probe()
            if _same(before[0], after[0]) or attempt == MOST_AGAIN:
                break
            self.again += 1
            before = after
        return result, self._number((before, after))

    def shown(self) -> list[int]:
        """The numbers of the states that are shown, the fastest first: those with enough turns, or the largest."""
        if not self.all:
            return [0]
        turns = {number: len(self.all[number].probes) for number in set(map(self.whole, range(len(self.all))))}
        least = min(LEAST_SHARE * sum(turns.values()), max(turns.values()))
        kept = [number for number, count in turns.items() if count >= least]
        return sorted(kept, key=lambda number: self.all[number].centre)

    def main(self) -> int:
        """The number of the state with most turns."""
        return max(set(map(self.whole, range(len(self.all)))), key=lambda one: len(self.all[one].probes), default=0)

    def to_json(self) -> list[dict[str, Any]]:
        """The states as JSON types; `restore` reads them."""
        return [
            {"seconds_8_bytes": state.centre, "seconds_1_kb": statistics.median(state.longer),
             "probes": len(state.probes), "part_of": self._part_of.get(number)}
            for number, state in enumerate(self.all)
        ]  # fmt: skip

    def restore(self, seen: Sequence[dict[str, Any]]) -> None:
        """Go on with the states of an earlier run, under their numbers. Raises KeyError or TypeError for other JSON."""
        for number, one in enumerate(seen):
            count = int(one["probes"])
            self.all.append(State([float(one["seconds_8_bytes"])] * count, [float(one["seconds_1_kb"])] * count))
            if one["part_of"] is not None:
                self._part_of[number] = int(one["part_of"])

    def is_shown(self, number: int) -> bool:
        """Whether a turn of this state counts for a state that is shown, and is no disturbance."""
        return self.whole(number) in self.shown()

    def assigned(self, numbers: Sequence[int]) -> list[int | None]:
        """For turns of these states: the state that is shown for each, and None for a disturbance.

        If all are disturbances, they count for the nearest state, because a gap in a table helps nobody.
        """
        shown = self.shown()
        mine = [self.whole(number) for number in numbers]
        if any(number in shown for number in mine):
            return [number if number in shown else None for number in mine]
        return [
            min(shown, key=lambda other: abs(math.log(self.all[other].centre / self.all[number].centre)))
            for number in mine
        ]

    def whole(self, number: int) -> int:
        """The number of the state of which state ``number`` has turned out to be a part; its own, if of none."""
        while number in self._part_of:
            number = self._part_of[number]
        return number

    def lines(self) -> list[str]:
        """What was seen, for the head of a table."""
        if not self.known:
            alone = (
                "one rank sends no messages"
                if self._comm.size == 1
                else "the ranks have no cores of their own on one node"
            )
            return [f"- states of the machine: not told apart, because {alone}"]
        shown = self.shown()
        turns = sum(len(state.probes) for number, state in enumerate(self.all) if number not in self._part_of)
        names = name_states(shown)
        described = [
            f"{names[number]}: MPI's 8 bytes in {1e6 * self.all[number].centre:.2f} us, 1 KB in "
            f"{1e6 * statistics.median(self.all[number].longer):.2f} us; {len(self.all[number].probes) / 2:.0f} turns"
            for number in shown
        ]
        rest = (turns - sum(len(self.all[number].probes) for number in shown)) / 2
        seen = "one state" if len(shown) == 1 else f"{len(shown)} states"
        return [
            f"- states of the machine: {seen} seen ({'; '.join(described)}). {self.again} turns were measured again, "
            f"because the state changed meanwhile; {rest:.0f} turns in other states are left out"
        ]

    def _number(self, ends: tuple[tuple[float, float], ...]) -> int:
        """The number of the state of a turn with these probes at its ends."""
        middle = statistics.fmean(small for small, _ in ends)
        known = [number for number in range(len(self.all)) if number not in self._part_of]
        near = [number for number in known if _same(self.all[number].centre, middle)]
        if near:
            found = min(near, key=lambda number: abs(self.all[number].centre - middle))
        else:
            found = len(self.all)
            self.all.append(State())
        state = self.all[found]
        state.probes += [small for small, _ in ends]
        state.longer += [longer for _, longer in ends]
        for other in known:  # two states whose centres meet are one
            if other != found and _same(self.all[other].centre, state.centre):
                state.probes += self.all[other].probes
                state.longer += self.all[other].longer
                self._part_of[other] = found
        return found

    def _message(self) -> tuple[float, float]:
        """The median seconds of an all-reduce of 8 bytes, and of 1 KB, on the slowest rank."""
        clock, middles = time.perf_counter, np.zeros(2)
        for index, buffer in enumerate(self._buffers):
            self._comm.Barrier()
            spent = []
            for _ in range(PROBE_CALLS):
                start = clock()
                self._comm.Allreduce(load_mpi().IN_PLACE, buffer)
                spent.append(clock() - start)
            middles[index] = statistics.median(spent)
        slowest = np.empty_like(middles)
        self._comm.Allreduce(middles, slowest, load_mpi().MAX)
        return float(slowest[1]), float(slowest[0])


def name_states(shown: list[int]) -> dict[int, str]:
    """The names of the states in tables: "state 1" is the fastest."""
    return {number: f"state {place}" for place, number in enumerate(shown, 1)}


def _same(one: float, other: float) -> bool:
    return max(one, other) < SAME * min(one, other)
