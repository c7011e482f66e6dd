"""A rank or a host that is lost over TCP: the survivors report before they end."""

import re

import pytest

from tests.support import mpirun
from tests.support.lab import hosts as lab

REASON = lab.why_not()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=f"no emulated hosts: {REASON}"), pytest.mark.slow]

#: the last rank dies; the others learn it in their next collective
DEATH = """
import os, signal, sys, time
import torch
from mpi4py import MPI
from commengine import Communicator
comm = Communicator(MPI.COMM_WORLD, timeout=3)
tensor = torch.ones(1 << 16)
comm.all_reduce(tensor)
comm.barrier()
if comm.rank == comm.size - 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(float(sys.argv[1]))
comm.all_reduce(tensor)
"""


@pytest.mark.long
@pytest.mark.skipif(lab.is_open_mpi(), reason="Open MPI's launcher ends all ranks when one dies")
@pytest.mark.parametrize("learns", ["at once", pytest.param("late", marks=pytest.mark.long)])
def test_survivors_say_where_a_rank_that_died_is_missing(tmp_path, learns):
    """The launcher leaves the survivors alone, as `srun -K0` does.

    MPICH crashes them: in the collective, or in the watcher's question to the rank that died. Then all stacks of the
    process are printed. A survivor that is not crashed reports.
    """
    (tmp_path / "program.py").write_text(DEATH)
    with lab.emulated_hosts(3, 100, 1000) as hosts:
        job = hosts.start(
            str(tmp_path / "program.py"), "0.5" if learns == "at once" else "0", log=tmp_path / "log",
            options=["-disable-auto-cleanup"],
        )  # fmt: skip
        try:
            assert job.wait(40) != 0
        finally:
            mpirun.stop(job)
    stderr = (tmp_path / "log").read_text()
    reported = re.findall(r"^\[rank (\d)\] .*\nmissing: rank 2, all_reduce #2", stderr, re.MULTILINE)
    crashed = stderr.count("Fatal Python error: ")
    assert len(reported) + crashed == 2, stderr
    assert len(re.findall(r'program.py", line 13 in <module>', stderr)) == crashed, stderr
