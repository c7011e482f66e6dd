"""The distribution's own MPI and mpi4py (Debian 12: Open MPI 4.1, mpi4py 3.1), below this environment's torch.

They are tested where they are installed: ``apt install python3-mpi4py openmpi-bin``.
"""

import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support import mpirun

PYTHON, LAUNCHER = "/usr/bin/python3", shutil.which("mpiexec.openmpi")

PROGRAM = """
import sys
import torch
import mpi4py
from commengine import Communicator, ProcessGrid, launch
def main(world):
    with Communicator(world.mpi, timeout=30, checked=True) as comm, ProcessGrid(comm, tensor=comm.size) as grid:
        tensor = torch.ones(1 << 20)
        comm.all_reduce(tensor)
        grid.tensor.all_reduce(tensor, stream=grid.tensor.new_stream()).wait()
        assert tensor.eq(4).all() and grid.data.size == 1 and grid.tensor.world_ranks() == [0, 1]
        window = comm.empty((1 << 18,)).fill_(1)
        comm.all_reduce(window)
        half = torch.ones(100, dtype=torch.bfloat16)
        comm.all_reduce(half)
        assert window.eq(2).all() and half.eq(2).all()
        sys.stdout.write(f"right with mpi4py {mpi4py.__version__}\\n")
        sys.stdout.flush()
launch.run(main)
"""


def why_not() -> str | None:
    """The reason why this machine cannot run the test."""
    if LAUNCHER is None or not Path(PYTHON).exists():
        return "no mpiexec.openmpi, or no Python of the system"
    words = "import sys, mpi4py; print(*sys.version_info[:2], mpi4py.__file__)"
    done = subprocess.run([PYTHON, "-I", "-c", words], capture_output=True, text=True, check=False)
    if done.returncode:
        return "the system's Python has no mpi4py"
    if done.stdout.split()[:2] != [str(number) for number in sys.version_info[:2]]:
        return "the system's Python has another version than this environment's"
    return None


def test_debian_12s_packages_are_new_enough():
    """Where pip must replace Debian's numpy, the recipe in docs/mpis.md does not hold."""
    needed = {one.name: one.specifier for one in map(Requirement, metadata.requires("commengine") or [])}
    assert "3.1.4" in needed["mpi4py"] and "1.24.2" in needed["numpy"]


REASON = why_not()


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_collectives_and_groups(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("mpi4py", "mpich", "openmpi", "__editable__")):
            (site / path.name).symlink_to(path)
    (tmp_path / "program.py").write_text(PROGRAM)
    argv = [str(LAUNCHER), "-n", "2", "--oversubscribe", PYTHON, str(tmp_path / "program.py")]
    done = mpirun.command(argv, timeout=60, env={"PYTHONPATH": f"{mpirun.ROOT}:{site}"})
    assert done.returncode == 0 and done.stderr == "", done
    assert len(set(done.stdout.splitlines())) == 1 and done.stdout.count("right with mpi4py ") == 2, done
