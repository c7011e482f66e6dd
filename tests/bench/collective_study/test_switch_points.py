"""bench.collectives --only switch-points: the size it chooses, and the file that a Communicator takes."""

import json
import re

import pytest

from bench.collective_study.results import measurements
from bench.collective_study.switch_points import SIZES, cells_of, parse, switch_point
from commengine.host.switch_points import NEVER, Key, Point, SwitchPoints
from tests.support import mpirun


def of(sizes, mpi, way, state="", name="window"):
    """The rows of one series in a state."""
    return measurements(
        {
            "operation": "all_reduce",
            "ranks": 2,
            "bytes": size,
            "state": state or None,
            "iterations": 9,
            "transport": transport,
            "seconds": {"p50": spent},
        }
        for size, times in zip(sizes, zip(mpi, way, strict=True), strict=True)
        for transport, spent in zip(("mpi", name), times, strict=True)
    )


def chosen(mpi, way):
    return switch_point(cells_of(of(SIZES, mpi, way), "p50"), "window")


def test_choice_is_the_least_total():
    """One disturbed cell on either side moves nothing; a way that never pays is never taken."""
    mpi = [10.0 * 2**index for index in range(len(SIZES))]
    way = [50.0 + 0.5 * time for time in mpi]  # as fast as MPI's at 100
    right = SIZES[next(index for index, time in enumerate(mpi) if time > 100)]
    assert chosen(mpi, way) == right
    assert chosen(mpi, [*way[:-2], 3 * mpi[-2], way[-1]]) == right
    assert chosen(mpi, [0.9 * mpi[0], *way[1:]]) == right
    assert chosen(mpi, [1.1 * time for time in mpi]) == NEVER
    assert chosen(mpi, [0.9 * time for time in mpi]) == SIZES[0]


def test_the_state_with_the_least_gain_counts():
    """A way that loses in one of two states is not taken there; a state without a row of a way has no cell."""
    rows = of([10, 20], [4.1, 9.0], [5.0, 6.0], "state 1") + of([10, 20], [9.0, 20.0], [6.0, 8.0], "state 2")
    cells = cells_of([*rows, rows[0].but(state="state 3")], "p50")
    assert [(cell["bytes"], cell["state"]) for cell in cells] == [
        (10, "state 1"), (10, "state 2"), (20, "state 1"), (20, "state 2")
    ]  # fmt: skip
    assert switch_point(cells, "window") == 20
    assert switch_point([cell for cell in cells if cell["state"] == "state 2"], "window") == 10
    (cell,) = cells_of([rows[0], rows[5]], "p50")  # no state has both ways
    assert cell == {"bytes": 10, "state": "several states", "calls": 9, "mpi": 4.1, "window": 6.0}


@pytest.mark.slow
def test_command(tmp_path):
    """Every series is measured, and rows of other numbers of ranks stay in the file."""
    path, table = tmp_path / "points.json", tmp_path / "points.md"
    SwitchPoints({Key("all_reduce", "full", 64): Point(bounce=1)}).save(path)
    done = mpirun.run(2, "-m", "bench.collectives", "--only", "switch-points", "--seconds", "1", "--largest", "16K",
                      "--json", str(path), "--output", str(table), timeout=100)  # fmt: skip
    assert done.returncode == 0, done
    rows = SwitchPoints.load(path).rows
    assert {key.ranks for key in rows} == {2, 64} and len(rows) == 7
    parts = table.read_text().split("\n## ")[1:]
    assert len(parts) >= 6  # some in several states of the machine; a busy one may make too few calls for any size
    assert all(" mpi, us |" in part or "its switch points stay" in part for part in parts), parts
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
    done = mpirun.run(ranks, "-m", "bench.collectives", "--only", "switch-points", *argv, timeout=60)
    start = "python -m bench.collectives --only switch-points: error: "
    (line,) = [line for line in done.stderr.splitlines() if line.startswith(start)]
    assert done.returncode == 2 and message in line and "Traceback" not in done.stderr
