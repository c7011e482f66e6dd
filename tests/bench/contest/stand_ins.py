"""What tests of contests need: small programs, and the page of a contest's cases."""

from types import SimpleNamespace

from bench.contest.parts.base import table
from bench.programs.driver import Contestant
from tests.support import mpirun


def program(name, ranks=1, mode="good", seconds="0.002"):
    """A program of ``ranks`` ranks, whose losses are 0.5 higher with two ranks than with one."""
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(mpirun.ROOT)}
    return Contestant(name, ranks, ["-m", "tests.jobs.contestant", mode, seconds], env)


def stand_in(name, losses, *, ranks=2, threads=1, idle_cpu_s=0.0):
    """A contestant that has run."""
    made = Contestant(name, ranks, ["-m", "program"], {"OMP_NUM_THREADS": str(threads)})
    return SimpleNamespace(
        name=name, contestant=made, losses=losses, note="", peak_rss_bytes=2e8, idle_cpu_s=idle_cpu_s, idle_wall_s=2.0
    )


def rows_of(*cases):
    """The lines of the cases' table."""
    return list(table(cases))
