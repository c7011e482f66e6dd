"""Debian's mpi4py-fft and dolfinx, on its Open MPI, below this environment's torch: the examples with these codes.

They are tested where they are installed: ``apt install python3-mpi4py-fft python3-dolfinx-real python3-matplotlib``.
"""

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.lab.test_system_mpi import LAUNCHER, PYTHON, REASON
from tests.lab.test_system_petsc import FOLDERS, MATPLOTLIB, TORCH
from tests.support import mpirun


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a test where the system's Python lacks one of the packages, or matplotlib."""
    reason = REASON
    if reason is None:
        words = "import importlib.util, sys; print(*(one for one in sys.argv[1:] if not importlib.util.find_spec(one)))"
        asked = [PYTHON, "-I", "-c", words, *packages]
        lacks = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
        lacks += [] if MATPLOTLIB.is_dir() else ["matplotlib"]
        reason = f"the system's Python has no {', '.join(lacks)}" if lacks else None
    return pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.fixture
def run(tmp_path):
    """Run an example on the system's Python, and return what it printed."""
    site = tmp_path / "site"
    site.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name.startswith(TORCH):
            (site / path.name).symlink_to(path)

    def run(example: str, ranks: int, *options: str) -> str:
        picture = tmp_path / "made" / "picture.png"
        words = [f"examples/{example}", *options, "--output", str(picture)]
        env = {"PYTHONPATH": f"{mpirun.ROOT}:{site}"} | ({"PETSC_DIR": str(FOLDERS[-1])} if FOLDERS else {})
        argv = [str(LAUNCHER), "-n", str(ranks), "--oversubscribe", PYTHON, *words]
        done = mpirun.command(argv, timeout=200, env=env)
        assert done.returncode == 0, done
        assert picture.stat().st_size > 5000
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(220)
@needs("mpi4py_fft")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_fno_runs_on_the_slabs_of_a_pseudo_spectral_solver(run, ranks):
    out = run("spectral_closure.py", ranks, "--points", "30", "--members", "2", "--steps", "30", "--leads", "2")
    rows = [int(number) for number in re.search(r"slabs of mpi4py-fft: \[(.*)\] rows", out).group(1).split(", ")]
    assert len(rows) == ranks and sum(rows) == 30
    assert ranks < 4 or len(set(rows)) == 2  # uneven
    assert "the field is the solver's memory: True" in out
    assert float(re.search(r"largest difference (\S+)", out).group(1)) < 1e-12
    errors = [float(number) for number in re.findall(r"(?:network|model|persistence) (\d\.\d+)", out)]
    assert len(errors) == 6 and all(
        model < persistence for model, persistence in zip(errors[1::3], errors[2::3], strict=True)
    )
    assert errors[0] < 1.1 * errors[1], "the network, which has hardly learned, changes little"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(220)
@needs("dolfinx", "petsc4py")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_network_becomes_the_law_of_a_material_in_dolfinx(run, ranks):
    out = run("dolfinx_closure.py", ranks, "--cells", "12", "--solutions", "60")
    cells = [int(number) for number in re.search(r"cells of the ranks: \[(.*)\]", out).group(1).split(", ")]
    assert len(cells) == ranks and sum(cells) == 2 * 12**2
    assert float(re.search(r"by differences: relative error (\S+)", out).group(1)) < 1e-5
    before, after = (float(number) for number in re.findall(r"the law is wrong by ([\d.]+)%", out))
    assert before > 20 and after < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "example, package, words",
    [
        ("spectral_closure.py", "mpi4py_fft", "needs the package mpi4py-fft"),
        ("dolfinx_closure.py", "dolfinx", "needs the package dolfinx"),
    ],
)
def test_an_example_without_its_package_says_so(tmp_path, example, package, words):
    """Also where it is installed: None in sys.modules, or a finder that finds nothing, hides it."""
    (tmp_path / "hide.py").write_text(
        "import importlib.util, runpy, sys\n"
        f"sys.modules[{package!r}] = None\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name == {package!r} else found(name)\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    done = mpirun.run(2, str(tmp_path / "hide.py"), str(mpirun.ROOT / "examples" / example), timeout=60)
    assert done.returncode == 0, done
    assert done.stdout.startswith("skipped: this example ") and words in done.stdout
    assert done.stdout.count("\n") == 1
