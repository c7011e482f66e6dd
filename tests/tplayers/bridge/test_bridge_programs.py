"""The bridge to programs in C++ and Fortran: gradients, failures, memory."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from tests.support import mpirun
from tplayers import bridge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

EXAMPLES = mpirun.ROOT / "examples" / "bridge"
SPLITS = [(1, 1), (2, 1), (1, 2)]
#: make test has the one in which neither side has all points
SOME_SPLITS = [pytest.param(ranks, marks=[] if ranks == (2, 1) else [pytest.mark.long]) for ranks in SPLITS]


def wrapper(name, compiler):
    """MPI's wrapper of a compiler, beside the launcher."""
    found = shutil.which(name, path=str(Path(mpirun.mpiexec()).parent))
    if found is None or shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}, or this MPI has no {name}")
    return found


@pytest.fixture(scope="module")
def heat(tmp_path_factory):
    """The C++ solver of the example."""
    program = tmp_path_factory.mktemp("bridge") / "heat"
    words = [wrapper("mpicxx", "c++"), "-O2", "-Wall", "-Wextra", "-Werror", "-I", bridge.include()]
    subprocess.run([*words, "-o", str(program), str(EXAMPLES / "heat.cpp")], check=True)
    return program


def both(program, ranks, sizes, *words):
    job = [sys.executable, "-m", "mpi4py", *words]
    return [mpirun.mpiexec(), "-n", str(ranks[0]), str(program), *sizes, ":", "-n", str(ranks[1]), *job]


def caller(heat, ranks, what, points=13, steps=9):
    sizes = (str(points), str(steps))
    return both(heat, ranks, sizes, str(mpirun.JOBS / "bridge_caller.py"), what, *sizes)


@pytest.mark.parametrize("ranks", SOME_SPLITS)
def test_the_gradient_through_a_cpp_solver_is_torchs(heat, ranks):
    """To 1e-12, also of two calls in a row; and to 1e-6 the slope of the solver's own results."""
    done = mpirun.command(caller(heat, ranks, "gradient"), timeout=100, fresh=False)
    assert done.returncode == 0, done.stderr
    alone, twice, slope = map(float, re.search(r"ERRORS (\S+) (\S+) (\S+)", done.stdout).groups())
    assert alone <= 1e-12 and twice <= 1e-12 and abs(slope) <= 1e-6


@pytest.mark.long
def test_a_thousand_calls_take_no_more_memory(heat):
    done = mpirun.command(caller(heat, (1, 1), "many", points=40), timeout=100, fresh=False)
    assert done.returncode == 0, done.stderr
    growth, before = map(int, re.search(r"GROWTH (\S+) (\S+)", done.stdout).groups())
    # A call that is kept has 9 states of 12,800 bytes: 700 of them would be 80 MB.
    assert before > 1e7 and growth < 4e6


@pytest.mark.parametrize("victim", ["heat", pytest.param("bridge_caller", marks=pytest.mark.long)])
def test_a_killed_program_ends_both(heat, victim):
    job = mpirun.start(caller(heat, (1, 1), "wait_for_a_kill"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        line = ""
        while "READY" not in line:
            line = job.stdout.readline()
            assert line or job.poll() is None
        pid = int(line.split()[1])
        if victim == "heat":
            (pid,) = map(
                int, subprocess.run(["pgrep", "-f", f"^{heat}"], capture_output=True, text=True).stdout.split()
            )
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        job.wait(timeout=30)
        assert job.returncode != 0 and time.monotonic() - began < 10
    finally:
        mpirun.stop(job)


def test_an_error_in_one_program_ends_both_and_says_which(heat):
    done = mpirun.command(caller(heat, (1, 2), "fail"), timeout=60, fresh=False)
    assert done.returncode != 0
    assert "[rank 2] Traceback" in done.stderr and "a rank that calls the solver has failed" in done.stderr


@pytest.mark.parametrize("way", ["forget", pytest.param("leave", marks=pytest.mark.long)])
def test_a_program_that_ends_without_closing_ends_both(heat, way):
    done = mpirun.command(caller(heat, (1, 1), way), timeout=30, fresh=False)
    assert done.returncode != 0 and "ends and has not closed its bridge: ending the job" in done.stderr


def test_programs_of_other_sizes_end_with_one_of_their_messages(heat):
    done = mpirun.command(caller(heat, (1, 1), "other points"), timeout=60, fresh=False)
    assert done.returncode != 0
    assert re.search(r"in the other program|the programs' fields are not the same", done.stderr)


@pytest.mark.long
def test_the_example_learns(heat, tmp_path):
    picture = tmp_path / "heating.png"
    words = [str(EXAMPLES / "heating.py"), "--points", "24", "--iterations", "100", "--output", str(picture)]
    done = mpirun.command(both(heat, (1, 1), ("24", "10"), *words), timeout=150, fresh=False)
    assert done.returncode == 0, done.stderr
    found = [float(one) for one in re.findall(r"wrong by (\S+)", done.stdout)]
    assert found[1] < found[0] and found[2] < found[3] and picture.stat().st_size > 5000


@pytest.fixture(scope="module")
def asks(tmp_path_factory):
    """A C program that asks, or answers in a wrong order."""
    program, source = tmp_path_factory.mktemp("bridge") / "asks", mpirun.JOBS / "bridge_asks.c"
    words = [wrapper("mpicc", "cc"), "-std=c99", "-Wall", "-Wextra", "-Werror", "-I", bridge.include()]
    subprocess.run([*words, "-o", str(program), str(source), "-lm"], check=True)
    return program


@pytest.mark.parametrize("calls", ["na", "ntt", "ntaa", "nk",
                                   *(pytest.param(one, marks=pytest.mark.long)
                                     for one in ("nn", "ntn", "t", "a", "ntat", "ntk"))])  # fmt: skip
def test_calls_of_c_in_a_wrong_order_end_both(asks, calls):
    done = mpirun.command([mpirun.mpiexec(), "-n", "1", asks, ":", "-n", "1", asks, calls], timeout=60)
    assert done.returncode != 0
    assert "bridge: rank 0 of its program: " in done.stderr and re.search(r"bridge_\w+ (comes|without)", done.stderr)


@pytest.mark.parametrize("ranks", SOME_SPLITS)
def test_a_c_program_asks(asks, ranks):
    done = mpirun.command(both(asks, ranks, (), str(mpirun.JOBS / "bridge_answers.py")), timeout=60, fresh=False)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"ERROR (\S+)", done.stdout)[1]) < 1e-5
    assert "ASKED call call gradient gradient call 1 2 2 2 1" in done.stdout


def test_a_fortran_program_answers(tmp_path):
    """A field and its gradient, in Fortran's order of axes."""
    mpicc = wrapper("mpicc", "gfortran")
    sources = [Path(bridge.include(), "commengine_bridge.f90"), EXAMPLES / "cube.f90"]
    words = ["gfortran", "-Wall", "-Werror", "-c", *map(str, sources)]
    subprocess.run(words, check=True, cwd=tmp_path)
    shim, main = Path(bridge.include(), "commengine_bridge_fortran.c"), mpirun.JOBS / "fortran_bridge.c"
    objects = [str(tmp_path / "commengine_bridge.o"), str(tmp_path / "cube.o")]
    words = [
        mpicc,
        "-I",
        bridge.include(),
        "-o",
        str(tmp_path / "cube"),
        str(main),
        str(shim),
        *objects,
        "-lgfortran",
        "-lm",
    ]
    subprocess.run(words, check=True)
    for ranks in SPLITS:
        cubes(both(tmp_path / "cube", ranks, (), str(EXAMPLES / "cubes.py")))


def cubes(words):
    done = mpirun.command(words, timeout=60)
    assert done.returncode == 0, done.stderr
    found = re.search(r"wrong by (\S+), the gradient by (\S+)", done.stdout)
    assert max(map(float, found.groups())) < 1e-14


def test_a_fortran_program_of_a_systems_mpi_answers(tmp_path, monkeypatch):
    """As docs/bridge.md says: Debian's MPICH has mpi_f08, and the wheel of mpi4py loads its library."""
    found = [shutil.which(f"{name}.mpich") for name in ("mpicc", "mpifort", "mpiexec")]
    library = Path(f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}/libmpich.so.12")
    if None in found or not library.exists():
        pytest.skip("no MPICH of the system with a Fortran compiler: apt install libmpich-dev gfortran")
    if importlib.util.find_spec("mpi4py._mpiabi") is None:
        pytest.skip("mpi4py is no wheel that loads any MPI: it was built for one")
    mpicc, mpifort, mpiexec = found
    folder = Path(bridge.include())
    subprocess.run([mpicc, "-c", "-I", folder, folder / "commengine_bridge_fortran.c"], check=True, cwd=tmp_path)
    split = EXAMPLES.parent / "mpmd" / "split_world.f90"
    sources = [folder / "commengine_bridge.f90", split, EXAMPLES / "cube.f90", EXAMPLES / "cubes.f90"]
    words = [mpifort, "-Wall", "-Werror", "-o", "cubes", *sources, "commengine_bridge_fortran.o"]
    subprocess.run(words, check=True, cwd=tmp_path)
    (tmp_path / "mpi").mkdir()
    (tmp_path / "mpi" / "libmpi.so.12").symlink_to(library)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "mpi"))
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "mpi" / "libmpi.so.12"))
    for ranks in SPLITS:
        cubes([mpiexec, *both(tmp_path / "cubes", ranks, (), str(EXAMPLES / "cubes.py"))[1:]])
    for programs in (1, 3):
        words = [mpiexec, *(["-n", "1", str(tmp_path / "cubes"), ":"] * programs)[:-1]]
        refused = mpirun.command(words, timeout=30)
        assert refused.returncode == 2 and "a job has two programs" in refused.stderr
