"""bench.switch_points: the size it chooses, and the file that a Communicator takes."""

import json
import re

import pytest

from bench.switch_points import SIZES, least_gains, parse, rows_of, switch_point
from commengine.host.switch_points import NEVER, Key, Point, SwitchPoints
from tests.support import mpirun


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


def test_the_state_with_the_least_gain_counts():
    """A way that loses in one of two states is not taken there; a size without a round of a way has no row."""
    cells = [
        {"mpi": [(4.0, 0), (9.0, 1), (4.2, 0)], "bounce": [(5.0, 0), (6.0, 1), (5.0, 0)]},
        {"mpi": [(9.0, 0), (20.0, 1)], "bounce": [(6.0, 0), (8.0, 1)]},
        {"mpi": [(20.0, 0)], "bounce": [(8.0, 1)]},
    ]
    rows = [row for state in (0, 1) for row in rows_of([10, 20, 30], cells, "p50", state)]
    assert [(row["bytes"], row["rounds"]) for row in rows] == [(10, 2), (20, 1), (10, 1), (20, 1)]
    assert least_gains(rows, "bounce") == ([10, 20], [pytest.approx(4.1), 9.0], [5.0, 6.0])
    assert switch_point(*least_gains(rows, "bounce")) == 20


@pytest.mark.slow
def test_command(tmp_path):
    """Every series is measured, and rows of other numbers of ranks stay in the file."""
    path, table = tmp_path / "points.json", tmp_path / "points.md"
    SwitchPoints({Key("all_reduce", "full", 64): Point(bounce=1)}).save(path)
    done = mpirun.run(2, "-m", "bench.switch_points", "--seconds", "1", "--largest", "64K", "--json", str(path),
                      "--output", str(table), timeout=100)  # fmt: skip
    assert done.returncode == 0, done
    rows = SwitchPoints.load(path).rows
    assert {key.ranks for key in rows} == {2, 64} and len(rows) == 7
    assert table.read_text().count("| 65,536 |") >= 6  # one for each state of the machine that the run met
    numbers = [row[way] for row in json.loads(path.read_text())["switch_points"] for way in Point._fields if way in row]
    assert {type(number) for number in numbers} == {int}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seconds", "-1"], "--seconds -1.0: must be a number above 0"),
        (["--margin", "0"], "--margin 0.0: must be at least 1"),
        (["--largest", "much"], "--largest: 'much' is not a size"),
        (["--largest", "2K"], "--largest 2K: valid: from 4K to 64M"),
        (["--output", "/no/where.md"], "--output /no/where.md: there is no folder /no"),
        (["--json", "/no/where.json"], "--json /no/where.json: there is no folder /no"),
        (
            ["--json", __file__],
            f"--json {__file__}: holds something else than switch points, so it cannot be completed",
        ),
    ],
)
def test_bad_options_are_named(argv, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(argv)


def test_rows_that_are_none_are_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"switch_points": [1]}')
    with pytest.raises(ValueError, match="holds something else"):
        parse(["--json", str(path)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "argv", "message"),
    [
        (1, [], "needs two ranks or more"),
        pytest.param(2, ["--margin", "0"], "--margin 0.0", marks=pytest.mark.long),
    ],
)
def test_bad_input_ends_every_rank_with_one_line(ranks, argv, message):
    done = mpirun.run(ranks, "-m", "bench.switch_points", *argv, timeout=60)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("python -m bench.switch_points: error: ")]
    assert done.returncode == 2 and message in line and "Traceback" not in done.stderr
