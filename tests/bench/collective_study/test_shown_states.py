"""Rows of collectives on a machine with several states: which count, and by which name."""

import pytest

from bench.collective_study.results import measurements
from bench.collective_study.shown_states import all_tables, of_shown_states, uncounted_lines
from bench.collective_study.tables import draw, table
from tests.bench.timing.test_states import states


def row(state, size, calls=30, operation="all_reduce", spent=2e-6):
    return {
        "operation": operation, "transport": "engine", "group": "world", "ranks": 2, "dtype": "float32", "redop": "sum",
        "root": -1, "in_place": True, "bytes": size, "count": size // 4, "iterations": calls, "state": state,
        "seconds": dict.fromkeys(("p50", "p95", "p99", "min", "max"), spent), "ci": [spent, spent], "converged": True,
        "algbw": 1e9, "busbw": 2e9, "wrong": 0,
    }  # fmt: skip


def turns(seen, count):
    return [seen.turn(int)[1] for _ in range(count)]


def test_a_call_that_was_always_disturbed_is_marked_and_the_remark_names_it():
    """As on a machine that was busy for the first call, of 64 KB, alone; two disturbances and one state."""
    seen = states(*[9.0] * 3, *[5.0] * 3, *[1.9] * 400)
    numbers = turns(seen, 200)
    assert sorted(set(numbers)) == [0, 1, 2] and seen.shown() == [2]
    rows = measurements([row(0, 64, 3), row(1, 64, 41), row(1, 128, 9), row(2, 128, 30), row(2, 256)])
    found = of_shown_states(rows, seen)
    assert [(one.bytes, one.iterations, one.state) for one in found] == [
        (64, 41, None), (128, 30, None), (256, 30, None)
    ]  # fmt: skip
    assert [one.disturbed for one in found] == [True, None, None]
    (remark,) = uncounted_lines(found)
    assert remark == (
        "- ~: 1 of 3 rows were measured in other states only, stand with the nearest, and count in no comparison: "
        "all_reduce of 64 bytes"
    )
    assert "2.00~" in table(found) and "state" not in table(found) and uncounted_lines(found[1:]) == []
    (axes, _) = draw(found).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[64, 128, 256], [64]]  # the cross is on the first point


def test_every_state_that_a_row_names_is_described_and_drawn_by_itself():
    seen = states(*[3.0] * 101, *[1.0] * 100)
    turns(seen, 190)
    found = of_shown_states(measurements([row(0, 64), row(1, 64), row(0, 128), row(1, 128)]), seen)
    (line,) = seen.lines()
    assert {one.state for one in found} == {"state 1", "state 2"}
    assert all(f"{one.state}: MPI's 8 bytes in" in line for one in found)
    slow = [one.to_json() for one in found if one.state == "state 2"]
    assert "state 2: MPI's 8 bytes in 3.00 us" in line and slow[0] | {"state": 0, "ci": [2e-6, 2e-6]} == row(
        0, 64
    )  # the fastest is 1
    labels = [one.get_label() for one in draw(found).axes[0].lines]
    assert labels == ["engine, float32, sum, in place, state 2", "engine, float32, sum, in place, state 1"]


def test_every_skew_is_drawn_by_itself():
    """Two of them at one size would make one line that goes back and forth."""
    rows = measurements(row(None, size) | {"skew": skew} for size in (64, 128) for skew in ("uniform", "zipf", "hot"))
    lines = draw(rows).axes[0].lines
    assert [list(line.get_xdata()) for line in lines] == [[64, 128]] * 3
    assert [line.get_label().split(", ")[-1] for line in lines] == ["uniform skew", "zipf skew", "hot skew"]
    assert len({line.get_linestyle() for line in lines}) == 3


def test_a_table_that_later_states_change_is_shown_again():
    seen = states(*[1.0] * 40, *[3.0] * 200)
    numbers = turns(seen, 30)
    early = table(of_shown_states(measurements([row(0, 64)]), seen))
    assert set(numbers) == {0} and "state" not in early
    turns(seen, 80)
    rows = of_shown_states(measurements([row(0, 64), row(1, 64), row(1, 64, operation="reduce")]), seen)
    final = all_tables(rows)
    assert len(final) == 2 and early not in final  # bench.collectives shows both again
    assert "state 1" in final[0] and "state 2" in final[0]


@pytest.mark.parametrize("rows", [[], measurements([row(None, 64)])])
def test_rows_without_states_stay(rows):
    assert of_shown_states(rows, None) == rows
