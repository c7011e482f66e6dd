"""When a measurement stops, what it says of the median, and how its ranks begin together."""

import threading

import numpy as np
import pytest

from bench.timing.sampling import Sampler, Stopping, half_in_errors, median_interval, sample
from bench.timing.starting import AgreedStart, Clock
from bench.timing.states import MOST_AGAIN, States


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Fake:
    """A call whose times are drawn from a generator, on a clock that only it moves."""

    def __init__(self, clock, draw, overhead=0.0):
        self.clock, self.draw, self.overhead, self.rounds = clock, draw, overhead, []

    def run(self, count):
        starts, seconds = [], []
        for _ in range(count):
            self.clock.now += self.overhead
            starts.append(self.clock.now)
            seconds.append(self.draw())
            self.clock.now += seconds[-1]
        self.rounds.append(count)
        return np.array(starts), np.array(seconds)


def alone(contestants, clock, **stopping):
    return sample(
        contestants, Stopping(**stopping), in_group=lambda x: x, in_world=lambda x: x, seed=0, clock=clock
    )  # fmt: skip


def test_a_steady_call_stops_at_once_and_a_noisy_one_when_its_median_is_known():
    clock, random = FakeClock(), np.random.default_rng(0)
    steady, noisy = Fake(clock, lambda: 1e-3), Fake(clock, lambda: random.lognormal(-7, 1))
    first, second = alone([steady, noisy], clock, confidence=0.05, seconds=1e9)
    assert first.converged and second.converged
    assert 20 <= first.count < 40 < 500 < second.count
    low, high = second.interval()
    assert (high - low) / 2 <= 0.05 * np.median(second.seconds)
    assert low <= np.exp(-7) <= high
    assert noisy.rounds[0] == 5  # warm-up, not counted
    assert sum(noisy.rounds[1:]) == second.count


@pytest.mark.parametrize("each, limit", [(1e-5, 0.2), (0.03, 0.2), (5.0, 0.2)])
def test_a_call_that_never_settles_stops_at_the_limit(each, limit):
    """Having spent no more than one round beyond it: meetings before a call count too."""
    clock, random = FakeClock(), np.random.default_rng(0)
    wild = Fake(clock, lambda: each * 10 ** random.uniform(-2, 2), overhead=each)
    (found,) = alone([wild], clock, confidence=1e-6, seconds=limit, warmup=1)
    assert not found.converged and found.finished
    assert found.spent >= limit
    before = found.spent - found._rounds[-1][0].sum() - each * len(found._rounds[-1][0])
    assert before < limit


@pytest.mark.parametrize("probe", [0.0, 0.2])
def test_the_limit_bounds_turns_that_are_measured_again_and_probes(probe):
    """On a machine whose state changes in every turn, and whose probes take longer than turns."""
    from mpi4py import MPI

    clock, random = FakeClock(), np.random.default_rng(0)

    def probed():
        clock.now += probe
        return random.choice([1e-6, 2e-6, 4e-6]), 3e-6

    busy = States(MPI.COMM_SELF, probe=probed)
    busy.known = True
    wild = Fake(clock, lambda: 1e-3 * 10 ** random.uniform(-2, 2))
    began, limit = clock.now, 7.0
    (found,) = sample(
        [wild], Stopping(confidence=1e-6, seconds=limit), in_group=lambda x: x, in_world=lambda x: x, seed=0,
        clock=clock, states=busy,
    )  # fmt: skip
    turn = max(0.1, max(wild.rounds) * 0.022)  # of calls with a mean of 22 ms; a turn is run five times at most
    assert busy.again > 10 and limit <= found.spent
    assert clock.now - began <= limit + (MOST_AGAIN + 2) * (3 * turn + probe)
    assert found.count >= 6


def test_one_group_goes_on_until_all_are_ready():
    """in_world is how the other groups say that they are not."""
    clock, calls = FakeClock(), []

    def in_world(values):
        calls.append(values)
        return values if len(calls) > 12 else np.where(values >= 0, 1.0, values)

    steady = Fake(clock, lambda: 1e-3)
    (found,) = sample([steady], Stopping(), in_group=lambda x: x, in_world=in_world, seed=0, clock=clock)
    assert found.converged and len(calls) == 14


def test_a_sample_is_the_slowest_rank_and_its_skew_that_of_the_starts():
    """in_group as a group of two would have it: the other begins 3 us later and takes twice as long."""
    clock = FakeClock()

    def in_group(mine):
        count = (len(mine) - 1) // 3
        other = np.concatenate([mine[:count] * 2, mine[count : 2 * count] + 3e-6, mine[2 * count : -1] - 3e-6, [0.0]])
        return np.maximum(mine, other)

    (found,) = sample(
        [Fake(clock, lambda: 1e-4)], Stopping(), in_group=in_group, in_world=lambda x: x, seed=0, clock=clock
    )  # fmt: skip
    np.testing.assert_allclose(found.seconds, 2e-4)
    np.testing.assert_allclose(found.skews, 3e-6, atol=1e-12)


def test_the_interval_of_the_median_covers_it_as_often_as_it_says():
    random = np.random.default_rng(1)
    for count in (6, 7, 10, 20, 50, 300):
        hits = 0
        for _ in range(400):
            low, high = median_interval(random.exponential(size=count))
            hits += low <= np.log(2) <= high
        assert 0.93 <= hits / 400 <= 1.0
    assert all(median_interval(np.arange(count)) is None for count in range(1, 6))  # they would hold it in 94% at most
    assert median_interval(np.arange(6.0)) == (0, 5) and median_interval(np.arange(10.0)) == (1, 8)
    for count in (6, 10, 60, 1000):  # half an interval, in standard errors of the median
        draws = [random.standard_normal(count) for _ in range(400)]
        half = np.mean([(high - low) / 2 for low, high in map(median_interval, draws)])
        assert half / half_in_errors(count) == pytest.approx(np.std([np.median(one) for one in draws]), rel=0.25)


def test_statistics_are_numpys():
    sampler = Sampler(Stopping())
    values = np.random.default_rng(2).exponential(size=101)
    sampler.add(values[:50], 1.0)
    sampler.add(values[50:], 1.0)
    found = sampler.statistics()
    assert found["p50"] == sorted(values)[50]
    assert found["p95"] == sorted(values)[95]
    assert (found["min"], found["max"]) == (values.min(), values.max())
    assert found["mean"] == pytest.approx(values.mean())


def test_calls_that_a_rank_began_late_are_not_counted_unless_too_few_are_better():
    sampler = Sampler(Stopping(skew=0.05, fewest=1))
    sampler.add(np.array([1e-3, 2e-3, 3e-3]), 1.0, np.array([9e-4, 9e-5, 1e-3]))
    assert sampler.seconds.tolist() == [2e-3] and sampler.skews.tolist() == [9e-5]
    assert (sampler.count, sampler.late, sampler.calls) == (1, 2, 3)
    worse = Sampler(Stopping(skew=0.05, fewest=2))
    worse.add(np.array([1e-3, 2e-3, 3e-3, 4e-3]), 1.0, np.array([9e-4, 4e-4, 1e-5, 9e-4]))
    assert worse.seconds.tolist() == [2e-3, 3e-3] and not worse.converged  # the one in time, and the least late
    assert (worse.count, worse.late) == (2, 2)
    barrier = Sampler(Stopping())
    barrier.add(np.array([1e-6, 2e-6]), 1.0, np.array([1e-3, 1e-3]))
    assert (barrier.count, barrier.late) == (2, 0)


class Ranks:
    """Ranks in threads, each with a clock of its own, and messages that take ``delay`` seconds between them."""

    def __init__(self, offsets, delay):
        self.offsets, self.delay, self.meeting = offsets, delay, threading.Barrier(len(offsets), timeout=20)
        self.true = [0.0 for _ in offsets]  # what all clocks would show, were they right
        self.posted = [0.0 for _ in offsets]

    def of(self, rank, clock):
        ranks = self

        class Exchange:
            def largest(self, mine):
                ranks.posted[rank] = mine
                ranks.meeting.wait()
                found, latest = max(ranks.posted), max(ranks.true)
                ranks.meeting.wait()
                ranks.true[rank] = latest + rank * ranks.delay()  # a barrier: the last rank leaves it last
                return found

            def from_first(self, mine):
                if rank == 0:
                    ranks.posted[0], ranks.sent = mine, ranks.true[0]
                ranks.meeting.wait()
                ranks.true[rank] = max(ranks.true[rank], ranks.sent + (rank > 0) * ranks.delay())
                found = ranks.posted[0]
                ranks.meeting.wait()
                return found

        def read():
            ranks.true[rank] += 1e-7
            return ranks.true[rank] + ranks.offsets[rank]

        def sleep(seconds):
            ranks.true[rank] += seconds

        return AgreedStart(clock, Exchange(), read, sleep)

    def starts(self, delay, calls):
        """When each rank began each call [calls, ranks], in true seconds, after a notice for messages of ``delay``."""
        found = np.zeros((calls, len(self.offsets)))

        def run(rank):
            start = self.of(rank, Clock.of(-self.offsets[rank], delay, len(self.offsets)))
            for number in range(calls):
                start()
                found[number, rank] = self.true[rank]
                self.true[rank] += 1e-4 * (rank + 1)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.offsets))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def test_ranks_begin_at_one_time_though_messages_take_long():
    starts = Ranks([0.0, 7.5, -3.0], delay=lambda: 2e-3).starts(2e-3, calls=5)
    assert np.ptp(starts, axis=1).max() < 1e-6
    assert (np.diff(starts[:, 0]) > 4e-3).all()


def test_notice_grows_until_nobody_is_late():
    """Messages take 20 times what was measured: the first calls are begun apart, and show it; the later together."""
    skews = np.ptp(Ranks([0.0, 1.0], delay=lambda: 20e-3).starts(1e-3, calls=6), axis=1)
    assert skews[0] > 1e-3
    assert (skews[-2:] < 1e-6).all()
