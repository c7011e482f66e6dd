"""Contests of programs: other losses and contestants that are not idle are errors; rows have the figures."""

import math

import pytest

from bench.contest.parts.programs import GivenTask, ProgramContest, losses_differ_by, turns
from bench.programs.driver import started
from bench.programs.step_task import StepTask
from tests.bench.contest.stand_ins import program, rows_of, stand_in

GOOD = [8.0, 6.0, 5.0, 4.0, 3.0]
TASK = GivenTask({"batch": 3}, StepTask(), tokens=12)


@pytest.mark.parametrize(
    ("losses", "largest"),
    [
        (GOOD, 0.0),
        ([8.0, 6.0, 5.0, 4.0, 9.0], 0.0),  # only the first four are compared
        ([8.0, 6.5, 5.0, 4.4], 0.5),
        ([8.0, 6.0, math.inf, 4.0], math.nan),
        ([8.0, math.nan, 5.0, 4.0], math.nan),
    ],
)
def test_the_largest_difference_of_losses(losses, largest):
    running = [stand_in("one", GOOD), stand_in("other", losses)]
    assert losses_differ_by(running) == pytest.approx(largest, nan_ok=True)


def test_rows_and_errors():
    running = [stand_in("one", GOOD), stand_in("other", [8.0, 6.0, 5.1, 4.0], idle_cpu_s=0.1, threads=2)]
    case = ProgramContest().compared(TASK, running, {"one": [1.0, 2.0, 3.0], "other": [3.0, 3.0, 3.0]})
    assert case.errors == [
        "losses of the first 4 steps differ by 1.00e-01 > 0.0001",
        "other used 5.0% of a core while others were running",
    ]
    assert case.numbers["contestants"]["other"]["command"] == "python -m program"
    assert case.facts["one"]["tokens/s"] == 6.0 and case.numbers["contestants"]["other"]["idle_core_share"] == 0.05
    assert rows_of(case) == [
        "| batch | side | s | time over one | ranks x threads | tokens/s | peak RSS, MB |",
        "|---|---|---|---|---|---|---|",
        "| 3 | one | 2.00 [1.50 to 2.50] | 1.00 [1.00 to 1.00] | 2 x 1 | 6 | 200 |",
        "| 3 | other | 3.00 [3.00 to 3.00] | 1.50 [1.25 to 2.25] | 2 x 2 | 4 | 200 |",
        "",
    ]
    case.baseline = "other"
    assert case.over("one").median == pytest.approx(2 / 3) and case.to_json()["baseline"] == "other"


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (program("other"), None),
        (program("other", 2), "losses of the first 4 steps differ by 5.00e-01 > 0.0001"),
        (program("other", mode="diverges"), "losses of the first 4 steps differ by nan > 0.0001"),
    ],
)
def test_real_programs_are_warmed_up_and_compared(other, problem, capsys):
    with started([program("one"), other]) as running:
        case = ProgramContest().compared(TASK, running, turns(running, 2, 1))
    assert capsys.readouterr().err == "one: warming up (good)\nother: warming up ({})\n".format(
        "diverges" if problem and "nan" in problem else "good"
    )
    assert [error for error in case.errors if "losses" in error] == ([problem] if problem else [])
    assert [len(values) for values in case.seconds.values()] == [2, 2]
