"""The driver of a contest, with real small programs: what they report, and what ends a contest."""

import os
import time

import pytest

from bench.programs import driver
from bench.programs.driver import Contestant, ContestError, rounds, started
from tests.support import mpirun

PROGRAM = str(mpirun.JOBS / "contestant.py")
FAILURES = {
    "dies": "rank 1: connection closed",
    "raises": r"rank 1: (.|\n)*ArithmeticError: the third step failed",
    "hangs": "no answer from 1 ranks",
    "dies at the start": r"a process ended(.|\n)*no such data set",
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


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("mode", FAILURES)
def test_a_failure_names_its_program_and_ends_all(mode, monkeypatch):
    monkeypatch.setattr(driver, "STEP_TIMEOUT_S", 1.0)
    monkeypatch.setattr(driver, "START_TIMEOUT_S", 20.0)
    began = time.monotonic()

    def contest():
        with started([contestant(mode)]) as running:
            for _ in range(3):
                running[0].run(1)

    with pytest.raises(ContestError, match=f"^{mode}: {FAILURES[mode]}"):
        contest()
    assert time.monotonic() - began < 15


@pytest.mark.slow
def test_a_program_that_never_connects_is_given_up(monkeypatch):
    monkeypatch.setattr(driver, "START_TIMEOUT_S", 0.5)
    waits = Contestant("waits", 1, ["-c", "import time; time.sleep(3600)"])
    with pytest.raises(ContestError, match=r"^waits: 0 of 1 ranks connected"), started([waits]):
        pass
