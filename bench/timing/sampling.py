"""Repeat a call until its median is known well enough or the time is up, alternating between several calls.

The confidence interval of the median is that of order statistics (Le Boudec, Performance Evaluation of Computer and
Communication Systems, 2010, table A.1). It assumes no distribution, but independent samples, of which it needs six: the
least and the largest of five hold the median in 94% only. The times of neighbouring calls are not quite independent, so
the interval is a little too narrow; alternating in rounds reduces this effect.
"""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bench.timing.states import States
from bench.timing.turns import slowest
from commengine import Communicator

Times = NDArray[np.float64]

MOST_IN_ROUND = 500
SKEW_FLOOR = 2e-6  # seconds; the clocks are not known better
#: the fewest samples of which two hold the median between them with 95%
FEWEST = 6
#: beyond so many samples the ranks are those of the normal distribution, which differ by one at most
EXACT_RANKS = 100


class Timed(Protocol):
    """A call that can be timed, on every rank of a group together."""

    def run(self, count: int) -> tuple[Times, Times]:
        """Call it ``count`` times; the ranks meet before each call.

        Returns when each call began on this rank, and its seconds.
        """


@dataclass(frozen=True)
class Stopping:
    """The rule that ends the timing of a call.

    It ends when the 95% interval of the median is within +-``confidence`` of it, or when ``seconds`` are over: those of
    all its turns, also of the ones that were measured again, and of the probes between them. warmup: calls that are not
    counted. least: calls that are made whatever the time. fewest: the least number of samples for a row that converged.
    skew: a call is not counted if its ranks began further apart than this share of its time (and than SKEW_FLOOR),
    unless fewer than ``fewest`` calls are left; then the ``fewest`` calls with the least delay count. round_seconds:
    about the time of one call's turn in a round.
    """

    confidence: float = 0.05
    seconds: float = 0.5
    warmup: int = 5
    fewest: int = 20
    least: int = 1
    most: int = 100_000
    skew: float = math.inf
    round_seconds: float = 0.01


def median_interval(values: Times) -> tuple[float, float] | None:
    """The 95% confidence interval of the median of ``values``; None of fewer than FEWEST."""
    count = len(values)
    if count < FEWEST:
        return None
    ordered, below = np.sort(values), _samples_below(count)
    return float(ordered[below]), float(ordered[count - 1 - below])


@functools.lru_cache
def _samples_below(count: int) -> int:
    """How many samples lie below the interval, and as many above: the most with which it holds the median with 95%."""
    if count > EXACT_RANKS:
        return math.floor(count / 2 - 0.98 * math.sqrt(count)) - 1
    below, rare = 0, 1  # of 2**count equally probable ways in which samples lie below or above the median
    while 40 * (rare + math.comb(count, below + 1)) <= 2**count:
        below += 1
        rare += math.comb(count, below)
    return below


@functools.lru_cache
def half_in_errors(count: int) -> float:
    """Half of `median_interval` of so many samples in standard errors of the median: 1.96, or more of few samples.

    Of few samples no two hold the median with exactly 95%, so the interval holds it with more. 1.96 below FEWEST.
    """
    if not FEWEST <= count <= EXACT_RANKS:
        return NormalDist().inv_cdf(0.975)
    rare = sum(math.comb(count, below) for below in range(_samples_below(count) + 1))
    return NormalDist().inv_cdf(1 - rare / 2**count)


class Sampler:
    """The samples of one call, and whether there are enough."""

    def __init__(self, stopping: Stopping) -> None:
        self._stopping = stopping
        self._rounds: list[tuple[Times, float, Times, int, float]] = []  # the arguments of `add`
        self.calls = 0
        self.running = 0.0
        self.spent = 0.0
        self.converged = False

    def add(
        self, seconds: Times, running: float, skew: Times | None = None, state: int = 0, beside: float = 0.0
    ) -> None:
        """Add samples: the slowest rank's times.

        running: the seconds that the calls took in all. skew: of the starts of each. state: of the machine, as
        `bench.timing.states` numbers it. beside: the seconds of turns that were measured again, and of probes.
        """
        self._rounds.append((seconds, running, np.zeros(len(seconds)) if skew is None else skew, state, beside))
        self.calls += len(seconds)
        self.running += running
        self.spent += running + beside
        if int(np.count_nonzero(self._excess() == 0)) >= self._stopping.fewest and (ends := self.interval()):
            half = (ends[1] - ends[0]) / 2
            self.converged = half <= self._stopping.confidence * float(np.median(self.seconds))

    @property
    def states(self) -> list[int]:
        """The states of the machine that the samples are of, in the order in which they came."""
        return list(dict.fromkeys(arguments[3] for arguments in self._rounds))

    def of(self, state: int) -> Sampler:
        """The samples of one state."""
        if self.states == [state]:
            return self
        made = Sampler(self._stopping)
        for arguments in self._rounds:
            if arguments[3] == state:
                made.add(*arguments)
        return made

    @property
    def count(self) -> int:
        """The number of samples."""
        return len(self.seconds)

    @property
    def late(self) -> int:
        """The number of calls that are not counted because a rank began late."""
        return self.calls - self.count

    @property
    def seconds(self) -> Times:
        """All samples."""
        return self._all(0)[self._counted()]

    @property
    def skews(self) -> Times:
        """The time between the first and the last rank's start, for every sample."""
        return self._all(2)[self._counted()]

    def _all(self, argument: int) -> Times:
        return np.concatenate([arguments[argument] for arguments in self._rounds])

    def _excess(self) -> Times:
        """The part of each call's skew above the limit."""
        return np.maximum(0.0, self._all(2) - np.maximum(self._stopping.skew * self._all(0), SKEW_FLOOR))

    def _counted(self) -> NDArray[np.int64]:
        """The places of the calls that count."""
        excess = self._excess()
        kept = max(int(np.count_nonzero(excess == 0)), min(len(excess), self._stopping.fewest))
        return np.sort(np.argsort(excess, kind="stable")[:kept])

    @property
    def finished(self) -> bool:
        """Whether there are enough samples, or the time is up."""
        over = self.spent >= self._stopping.seconds and self.calls >= self._stopping.least
        return self.converged or over or self.calls >= self._stopping.most

    def next_count(self) -> int:
        """The number of calls of the next round: a few milliseconds' worth, and never far beyond the limit.

        On a busy machine, where probes take longer than that, as much time as they take, up to ten times as long.
        """
        each, usual = self.running / self.calls, self._stopping.round_seconds
        left = max(self._stopping.seconds - self.spent, 0.0)
        beside = (self.spent - self.running) / len(self._rounds)
        return max(1, min(MOST_IN_ROUND, int(min(max(usual, min(beside, 10 * usual)), left) / max(each, 1e-9))))

    def statistics(self) -> dict[str, float]:
        """Quantiles in seconds."""
        values = self.seconds
        middle, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99)).tolist()
        edges = {"min": float(values.min()), "max": float(values.max()), "mean": float(values.mean())}
        return {"p50": middle, "p95": p95, "p99": p99, **edges}

    def interval(self) -> tuple[float, float] | None:
        """The 95% confidence interval of the median, if there are enough samples."""
        return median_interval(self.seconds)


#: the element-wise largest values of all ranks' arrays
Largest = Callable[[Times], Times]


def sample(
    calls: Sequence[Timed],
    stopping: Stopping,
    *,
    in_group: Largest,
    in_world: Largest,
    seed: int,
    offset: float = 0.0,
    states: States | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Sampler]:
    """Time all ``calls``, alternating in rounds of a random order, until each is `Sampler.finished` in every group.

    Every rank of the world calls it together. A group that is ready goes on until all groups are, because they are
    measured side by side. in_group, in_world: the element-wise largest values over a rank's group, and over all ranks.
    A sample is the slowest rank's time of one call. offset: added to this rank's clock to read the clock that all
    ranks share. seed: the same on every rank. states: of the machine; a turn in which they change is measured again.
    """
    order = random.Random(seed)

    def turn(call: Timed, count: int) -> tuple[Times, Times, float]:
        begin = clock()
        starts, seconds = call.run(count)
        return starts, seconds, clock() - begin

    samplers = [Sampler(stopping) for _ in calls]
    counts = []
    for call in calls:
        begin = clock()
        call.run(stopping.warmup)
        each = (clock() - begin) / stopping.warmup
        fewest = FEWEST if FEWEST * each <= stopping.seconds else 1  # one turn is enough for an interval
        most = int(min(stopping.round_seconds, stopping.seconds) / max(each, 1e-9))
        counts.append(max(fewest, min(MOST_IN_ROUND, most)))
    going = list(range(len(calls)))
    while going:
        # Every rank must make the same number of calls: the smallest number that any rank would make.
        agreed = -in_world(np.array([-counts[index] for index in going], dtype=np.float64))
        order.shuffle(turns := list(zip(going, agreed, strict=True)))
        for index, count in turns:
            run, begin = partial(turn, calls[index], int(count)), clock()
            (starts, seconds, running), state = (run(), 0) if states is None else states.turn(run)
            starts, beside = starts + offset, max(0.0, clock() - begin - running)
            largest = in_group(np.concatenate([seconds, starts, -starts, [running, beside]]))
            slowest, last, minus_first, spent = np.split(largest, np.cumsum([int(count)] * 3))
            samplers[index].add(slowest, float(spent[0]), last + minus_first, state, float(spent[1]))
            counts[index] = samplers[index].next_count()
        unfinished = in_world(np.array([not samplers[index].finished for index in going], dtype=np.float64))
        going = [index for index, more in zip(going, unfinished, strict=True) if more]
    return samplers


def mean_seconds(call: Callable[[], object], count: int, world: Communicator) -> float:
    """The slowest rank's mean seconds of ``count`` calls back to back. Collective."""

    def repeat() -> None:
        for _ in range(count):
            call()

    return slowest(world, repeat) / count
