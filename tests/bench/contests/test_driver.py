"""The driver of a contest, with real small programs: what they report, and what ends a contest."""

import os
import statistics
import time

import numpy as np
import pytest

from bench.contests import driver
from bench.contests.driver import Contestant, ContestError, Spread, ratio, rounds, started
from tests.support import mpirun

PROGRAM = str(mpirun.JOBS / "contestant.py")
FAILURES = {
    "dies": "rank 1: connection closed",
    "raises": r"rank 1: (.|\n)*ArithmeticError: the third step failed",
    "hangs": "no answer from 1 ranks",
    "dies at the start": r"a process ended(.|\n)*no such data set",
    "greets with nonsense": "unexpected greeting 'hello'",
    "greets as another rank": "unexpected greeting .*'rank': 0",
    "answers nonsense": "rank [01]: unexpected answer 'well done'",
    "answers without times": "rank [01]: unexpected answer .*'loss'",
    "answers too few steps": "rank [01]: unexpected answer .*'seconds'",
}


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """The programs find the packages that are tested."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(mpirun.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))


def contestant(name, mode="", *, ranks=2, seconds=0.0):
    return Contestant(name, ranks, [PROGRAM, mode or name, str(seconds)])


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_programs_alternate_and_report_their_steps():
    fast, slow = contestant("fast", ranks=1), contestant("slow", seconds=0.02)
    with started([fast, slow]) as running:
        seconds = rounds(running, 3, 2, seed=1)
        pids = [pid for one in running for pid in one._pids]
        assert [one.note for one in running] == ["fast", "slow"] and len(set(pids)) == 3
        assert all(map(alive, pids))
    assert not any(map(alive, pids))
    assert running[0].losses == [7.0, 6, 5, 4, 3, 2]
    assert running[1].losses == [7.5, 6.5, 5.5, 4.5, 3.5, 2.5]  # the mean over both ranks
    assert [len(times) for times in seconds.values()] == [3, 3] and min(seconds["slow"]) >= 0.02
    assert all(one.peak_rss_bytes > 1_000_000 for one in running)
    # The fast one waited while the slow one slept twice in each of three rounds, and used no processor time for that.
    assert running[0].idle_wall_s >= 3 * 2 * 0.02
    assert running[0].idle_cpu_s <= 0.5 * running[0].idle_wall_s


@pytest.mark.parametrize("mode", FAILURES)
def test_a_failure_names_its_program_and_ends_all(mode, monkeypatch):
    monkeypatch.setattr(driver, "STEP_TIMEOUT_S", 1.0)
    monkeypatch.setattr(driver, "START_TIMEOUT_S", 20.0)
    began = time.monotonic()

    def contest():
        with started([contestant(mode)]) as running:
            for _ in range(3):
                running[0].run(2 if mode.startswith("answers") else 1)

    with pytest.raises(ContestError, match=f"^{mode}: {FAILURES[mode]}"):
        contest()
    assert time.monotonic() - began < 15


def test_a_program_that_never_connects_is_given_up(monkeypatch):
    monkeypatch.setattr(driver, "START_TIMEOUT_S", 0.5)
    waits = Contestant("waits", 1, ["-c", "import time; time.sleep(3600)"])
    with pytest.raises(ContestError, match=r"^waits: 0 of 1 ranks connected"), started([waits]):
        pass


def test_ratios_are_of_one_round():
    random = np.random.default_rng(0)
    ours, theirs = random.uniform(1, 2, (2, 9))
    found = ratio(ours.tolist(), theirs.tolist())
    quotients = ours / theirs
    assert (found.median, found.low, found.high) == (np.median(quotients), quotients.min(), quotients.max())
    assert found.median != pytest.approx(np.median(ours) / np.median(theirs), rel=1e-3)  # these would be other numbers
    assert Spread.of([3.0, 1.0, 2.0]).text(1) == "2.0 [1.0 to 3.0]"
    with pytest.raises(ValueError, match="longer"):
        ratio([1.0], [1.0, 2.0])


def test_every_program_has_one_turn_in_a_round_in_an_order_of_the_seed():
    turns = []

    class Turn:
        idle_cpu_s = idle_wall_s = 0.0

        def __init__(self, name):
            self.name = name

        def run(self, steps):
            turns.append(self.name)
            return float(steps)

        def cpu_seconds(self):
            return 0.0

    found = rounds([Turn(name) for name in "abc"], 20, 4, seed=3)
    assert found == {name: [4.0] * 20 for name in "abc"}
    each = [tuple(turns[k : k + 3]) for k in range(0, 60, 3)]
    assert {tuple(sorted(one)) for one in each} == {("a", "b", "c")} and len(set(each)) > 3
    first = list(turns)
    turns.clear()
    rounds([Turn(name) for name in "abc"], 20, 4, seed=3)
    assert turns == first and statistics.mean(found["a"]) == 4.0
