"""The contest of split fields: other losses, compared relatively, are an error; a real contest has every row."""

import json
import math
import sys

import pytest

from bench.contest.fields import CONTEST
from bench.contest.parts.programs import GivenTask
from bench.programs.field_task import FieldTask
from tests.bench.contest.stand_ins import stand_in
from tests.support import mpirun


@pytest.mark.parametrize(("loss", "wrong"), [(0.8, 0), (0.80007, 0), (0.8001, 1), (math.nan, 1)])
def test_losses_are_compared_relatively(loss, wrong):
    running = [stand_in("one", [1.0, 0.9, 0.8, 0.7]), stand_in("other", [1.0, 0.9, loss, 0.7])]
    case = CONTEST.compared(GivenTask({}, FieldTask(), 1), running, {"one": [0.2, 0.1], "other": [0.3, 0.2]})
    assert len(case.errors) == wrong and case.over("other").median == pytest.approx(1.75)


@pytest.mark.slow
@pytest.mark.long
def test_a_contest(tmp_path):
    sizes = ["--points=16", "--width=4", "--depth=1", "--batch=2", "--rounds=1", "--steps=1"]
    files = [f"--json={tmp_path / 'r.json'}", f"--output={tmp_path / 'r.md'}"]
    done = mpirun.command([sys.executable, "-m", "bench.contest", "fields", *sizes, *files], timeout=150)
    cases = json.loads((tmp_path / "r.json").read_text())["cases"]
    assert [error for one in cases for error in one["errors"] if "losses" in error] == [], done.stderr
    assert [(one["labels"]["width"], len(one["rows"])) for one in cases] == [(4, 3), (4, 3)]
    assert (tmp_path / "r.md").read_text().count("| torch-1-thread | ") == 2
