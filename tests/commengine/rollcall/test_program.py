"""Roll call of real jobs: the odd rank of a program that hangs is named first, and a slow one is left alone."""

import random
import re
import sys

import pytest

from tests.commengine.rollcall.drawn import first_report
from tests.support import mpirun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

EVERY, RANKS = 1, 3  # drawn.py has 2 to 8 ranks
#: what the first line about the odd rank says
SAYS = {
    "sleep": r"waits, outside of MPI, for \d+ s\n.*time\.sleep\(1000\)",
    "loop": r"moves\n.*np\.sqrt\(large",
    "one call": r"(computes in one call|moves)",
    "stopped": r"is stopped",
    "read": r"waits, outside of MPI, for \d+ s\n.*os\.read",
    "send": r"waits in Send.*\n.*comm\.Send\(large",
    "barrier": r"waits in Barrier",
}


def watched(ranks, *words):
    job = [mpirun.mpiexec(), "-n", str(ranks), sys.executable, "-m", "commengine.rollcall", "--every", str(EVERY)]
    return [*job, str(mpirun.JOBS / "diverges.py"), *map(str, words)]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "barrier" else [pytest.mark.long]) for kind in SAYS]
)
def test_the_odd_rank_is_named_first(kind, tmp_path):
    drawn = random.Random(kind)
    odd, last = drawn.randrange(RANKS), drawn.randrange(4)
    found = first_report(watched(RANKS, kind, odd, last), tmp_path)
    assert found.startswith(f"half of the ranks, or more, have not moved for {EVERY} s: {RANKS} ranks")
    assert re.match(rf"  rank {odd} \(\S+ process \d+\) {SAYS[kind]}", found.partition("\n")[2]), found


@pytest.mark.long
def test_a_slow_program_is_left_alone_and_its_results_are_its_own(tmp_path):
    """Each step is shorter than the time of a report. Nothing stays behind."""
    words = [word if word != str(EVERY) else "20" for word in watched(3, "slow", 0, 12)]
    done = mpirun.command(words, timeout=120, cwd=tmp_path, fresh=False)
    assert done.returncode == 0 and "rollcall" not in done.stderr, done.stderr
    assert done.stdout.count("is through") == 3
    assert not list(tmp_path.iterdir())


def test_a_short_program_ends_with_its_own_words(tmp_path):
    short = tmp_path / "short.py"
    short.write_text("raise SystemExit('bad input')")
    words = [mpirun.mpiexec(), "-n", "2", sys.executable, "-m", "commengine.rollcall", str(short)]
    done = mpirun.command(words, timeout=60, cwd=tmp_path, fresh=False)
    assert done.returncode == 1 and done.stderr.replace("\n", "") == "bad input" * 2


def test_a_wrong_option_is_named(tmp_path):
    words = [sys.executable, "-m", "commengine.rollcall"]
    for more, named in ((["none.py"], "none.py: must be a Python file"), (["--every", "0", __file__], "at least 0.5")):
        done = mpirun.command([*words, *more], timeout=60, cwd=tmp_path, fresh=False)
        assert done.returncode == 2 and named in done.stderr
