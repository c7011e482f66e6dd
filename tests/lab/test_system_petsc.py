"""Debian's petsc4py, on its Open MPI, below this environment's torch: the example with a field of PETSc.

It is tested where it is installed: ``apt install python3-petsc4py python3-matplotlib``.
"""

import re
import sysconfig
from pathlib import Path

import pytest

from tests.lab.test_system_mpi import LAUNCHER, PYTHON, REASON
from tests.support import mpirun

#: where Debian keeps PETSc and its Python binding, which was built with Debian's NumPy
FOLDERS = sorted(Path("/usr/lib/petscdir").glob("petsc*/*-real"))
MATPLOTLIB = Path("/usr/lib/python3/dist-packages/matplotlib")
#: what torch needs of this environment, besides NumPy
TORCH = ("torch", "functorch", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock",
         "fsspec")  # fmt: skip

NO_PETSC = None if FOLDERS and MATPLOTLIB.is_dir() else "the system's Python has no petsc4py, or no matplotlib"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(bool(REASON or NO_PETSC), reason=str(REASON or NO_PETSC))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_field_of_petsc_goes_through_a_convolution_without_a_copy(tmp_path, ranks):
    site = tmp_path / "site"
    site.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name.startswith(TORCH):
            (site / path.name).symlink_to(path)
    words = ["examples/petsc_dmda.py", "--output", str(tmp_path / "u.png")]
    done = mpirun.command(
        [str(LAUNCHER), "-n", str(ranks), "--oversubscribe", PYTHON, *words],
        timeout=60,
        env={"PYTHONPATH": f"{mpirun.ROOT}:{site}", "PETSC_DIR": str(FOLDERS[-1])},
    )
    assert done.returncode == 0, done
    assert "the field is PETSc's memory: True" in done.stdout, done
    difference, residual = re.search(
        r"from PETSc's matrix: (\S+)\n.*: \d+ iterations, residual (\S+)", done.stdout
    ).groups()
    assert float(difference) < 1e-13 and float(residual) < 1e-9
    assert (tmp_path / "u.png").stat().st_size > 5000
