"""bench.switch_points: the size it chooses, and the file that a Communicator takes."""

import mpirun
from bench.switch_points import SIZES, switch_point
from commengine.switch_points import NEVER, Key, Point, SwitchPoints


def test_choice_is_the_least_total():
    """One disturbed cell on either side moves nothing; a way that never pays is never taken."""
    mpi = [10.0 * 2**index for index in range(len(SIZES))]
    way = [50.0 + 0.5 * time for time in mpi]  # as fast as MPI's at 100
    right = SIZES[next(index for index, time in enumerate(mpi) if time > 100)]
    assert switch_point(SIZES, mpi, way) == right
    assert switch_point(SIZES, mpi, [*way[:-2], 3 * mpi[-2], way[-1]]) == right
    assert switch_point(SIZES, mpi, [0.9 * mpi[0], *way[1:]]) == right
    assert switch_point(SIZES, mpi, [1.1 * time for time in mpi]) == NEVER
    assert switch_point(SIZES, mpi, [0.9 * time for time in mpi]) == SIZES[0]


def test_command(tmp_path):
    """Every series is measured, and rows of other numbers of ranks stay in the file."""
    path, table = tmp_path / "points.json", tmp_path / "points.md"
    SwitchPoints({Key("all_reduce", "full", 64): Point(bounce=1)}).save(path)
    done = mpirun.run(2, "-m", "bench.switch_points", "--seconds", "1", "--largest", "65536", "--json", str(path),
                      "--output", str(table), timeout=100)  # fmt: skip
    assert done.returncode == 0, done
    rows = SwitchPoints.load(path).rows
    assert {key.ranks for key in rows} == {2, 64} and len(rows) == 7
    assert table.read_text().count("| 65,536 |") == 6
    assert mpirun.run(1, "-m", "bench.switch_points", timeout=60).returncode != 0
