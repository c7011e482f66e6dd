"""bench.fields: all contestants train the same network, other losses are an error, and the table has every row."""

import json
import math
from types import SimpleNamespace

import pytest

from bench.contests.field_task import FieldTask
from bench.fields import __main__ as fields
from tests.support import mpirun


def contestant(name, losses):
    made = next(one for one in fields.contestants("task.json") if one.name == name)
    return SimpleNamespace(
        name=name, contestant=made, losses=losses, idle_cpu_s=0.0, idle_wall_s=1.0, peak_rss_bytes=2e8, note=""
    )


def result(losses):
    seconds = {fields.OURS: [0.2, 0.1], fields.ONE_THREAD: [0.3, 0.2], fields.TWO_THREADS: [0.2, 0.2]}
    running = [contestant(name, losses.get(name, [1.0, 0.9, 0.8, 0.7])) for name in seconds]
    return fields.result_of(FieldTask(), running, seconds)


def test_the_ratio_is_of_one_round():
    found = result({})
    assert found["errors"] == []
    times = {row["name"]: row["ratio_to_baseline"]["median"] for row in found["contestants"]}
    assert times == pytest.approx({fields.OURS: 1.0, fields.ONE_THREAD: 1.75, fields.TWO_THREADS: 1.5})


@pytest.mark.parametrize("loss", [0.8001, math.nan])
def test_other_losses_are_an_error(loss):
    (error,) = result({fields.TWO_THREADS: [1.0, 0.9, loss, 0.7]})["errors"]
    assert "losses of the first 4 steps differ" in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--points", "20"], "--points 20: must be a multiple"), (["--layout", "rows"], "--layout"), (["--depth=0"], "0")],
)
def test_bad_arguments(argv, message, capsys):
    with pytest.raises((ValueError, SystemExit)) as raised:
        fields.read(argv)
    assert message in str(raised.value) + capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
def test_a_contest(tmp_path):
    sizes = ["--points=16", "--width=4", "--depth=1", "--batch=2", "--rounds=1", "--steps=1"]
    files = [f"--json={tmp_path / 'r.json'}", f"--output={tmp_path / 'r.md'}"]
    done = mpirun.command([mpirun.sys.executable, "-m", "bench.fields", *sizes, *files], timeout=150)
    contests = json.loads((tmp_path / "r.json").read_text())["contests"]
    errors = [error for one in contests for error in one["errors"] if "losses" in error]
    assert errors == [], done.stderr
    assert [(one["task"]["width"], len(one["contestants"])) for one in contests] == [(4, 3), (4, 3)]
    assert (tmp_path / "r.md").read_text().count("| torch-1-thread | 1 x 1 |") == 2
