"""The table of all contests: units, columns, ratios, and what stands in JSON."""

import pytest

from bench.contest.parts.base import Case, Contest, table
from tests.bench.contest.stand_ins import rows_of


def test_neighbours_with_the_same_columns_share_a_table_and_its_unit():
    first = Case({"a": 1}, {"x": [2e-3, 2e-3], "y": [1e-3, 1e-3]})
    second = Case({"a": 2000}, {"x": [1.0, 3.0], "y": [2.0, 6.0]}, {"x": {"rate": 1234.5}})
    third = Case({"a": 3}, {"x": [2e-6], "y": [1e-6]})
    fourth = Case({"a": 4}, {"x": [3e-3], "y": [3e-3]})
    assert rows_of(first, second, third, fourth) == [
        "| a | side | ms | time over x |",
        "|---|---|---|---|",
        "| 1 | x | 2.00 [2.00 to 2.00] | 1.00 [1.00 to 1.00] |",
        "| 1 | y | 1.00 [1.00 to 1.00] | 0.50 [0.50 to 0.50] |",
        "",
        "| a | side | s | time over x | rate |",
        "|---|---|---|---|---|",
        "| 2,000 | x | 2.00 [1.50 to 2.50] | 1.00 [1.00 to 1.00] | 1,234 |",
        "| 2,000 | y | 4.00 [3.00 to 5.00] | 2.00 [2.00 to 2.00] |  |",
        "",
        "| a | side | us | time over x |",
        "|---|---|---|---|",
        "| 3 | x | 2.00 [2.00 to 2.00] | 1.00 [1.00 to 1.00] |",
        "| 3 | y | 1.00 [1.00 to 1.00] | 0.50 [0.50 to 0.50] |",
        "| 4 | x | 3000.00 [3000.00 to 3000.00] | 1.00 [1.00 to 1.00] |",
        "| 4 | y | 3000.00 [3000.00 to 3000.00] | 1.00 [1.00 to 1.00] |",
        "",
    ]


def test_a_difference_of_times_may_be_negative():
    case = Case({}, {"x": [2e-3], "y": [-4e-3]})
    assert rows_of(case)[2:4] == [
        "| x | 2.00 [2.00 to 2.00] | 1.00 [1.00 to 1.00] |",
        "| y | -4.00 [-4.00 to -4.00] | -2.00 [-2.00 to -2.00] |",
    ]


def test_a_contest_without_times_has_its_facts_alone():
    case = Case({}, {}, {"small": {"loss": "1.5", "steps": 3}, "large": {"steps": 12000}})
    assert list(table([case]))[2:4] == ["| small | 1.5 | 3 |", "| large |  | 12,000 |"]
    assert case.sides == ["small", "large"] and case.base == "small"


def test_errors_stand_in_the_page_and_make_the_status():
    case = Case({}, {"x": [1.0]}, errors=["it is wrong"], numbers={"more": 5})
    assert "- **ERROR: it is wrong**" in Contest().page(None, [case])
    assert (Contest().status([case]), Contest().status([Case()])) == (1, 0)
    assert case.to_json() == {
        "labels": {}, "baseline": "x", "errors": ["it is wrong"], "more": 5,
        "rows": [{"name": "x", "seconds": [1.0], "spread": {"median": 1.0, "low": 1.0, "high": 1.0},
                  "ratio": {"median": 1.0, "low": 1.0, "high": 1.0}}],
    }  # fmt: skip


def test_a_case_without_sides_has_its_numbers_alone():
    found = Case({"operation": "barrier"}, numbers={"result": 1}).to_json()
    assert found == {"labels": {"operation": "barrier"}, "baseline": "", "rows": [], "errors": [], "result": 1}


def test_the_baseline_may_be_another_side():
    case = Case({}, {"x": [2.0, 4.0], "y": [1.0, 1.0]}, baseline="y")
    assert case.over("x").median == pytest.approx(3.0)
    assert "| side | s | time over y |" in rows_of(case)
