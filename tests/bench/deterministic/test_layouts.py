"""bench.deterministic.layouts: the grid is done in pieces, and the result says which runs differ."""

import json
from argparse import Namespace

import pytest

from bench.deterministic import layouts
from bench.deterministic.grid import ALONE, GridRun, cells
from bench.deterministic.tiny_run import RunLayout
from commengine import UsageError

ABOUT = {"command": "c", "date": "d", "hardware": "h", "gpus": [], "load_average_before": 0.0, "versions": {}}
FOUND = {"steps": [["1", "2", False, 3]], "parameter.a": "x"}
WANTED = [
    GridRun("alone", "gpt", "fp32", ALONE),
    GridRun("layout", "gpt", "fp32", RunLayout(2, 1, {"sequence_parallel": True})),
    GridRun("control alone", "gpt", "fp32", ALONE),
    GridRun("control", "gpt", "fp32", RunLayout(2, 1)),
]


def result(*found):
    rows = []
    for cell, one in zip(WANTED, found, strict=False):
        rows.append(layouts._row(cell, one, rows) | {"seconds": 1.0})
    return ABOUT | {"settings": {"steps": 1}, "rows": rows}


def test_runs_that_are_alike_and_a_control_that_is_not():
    good = result(FOUND, FOUND, FOUND, FOUND | {"parameter.a": "y"})
    assert layouts._status(good, WANTED) == 0
    text = layouts.markdown(good, WANTED)
    assert "- 4 of 4 runs of 1 steps are done, in 4 s" in text and "WRONG" not in text
    assert "- 1 of 1 runs have all digests" in text
    assert f"| gpt | fp32 | 2 | 0 | `{good['rows'][0]['digest']}` |  |  |  | 1 of 1 |" in text
    assert "| 1 of 1 differ |" in text and "| `--sequence-parallel` | with: 1 |" in text


def test_a_run_that_differs_is_named():
    wrong = result(FOUND, FOUND | {"steps": []}, FOUND, FOUND)
    assert layouts._status(wrong, WANTED) == 1
    text = layouts.markdown(wrong, WANTED)
    assert "- WRONG: gpt, fp32, layout: TP 2, DP 1, sequence-parallel: 1 digests differ: steps" in text
    assert "- WRONG: gpt, fp32, control: TP 2, DP 1: 0 digests differ: " in text
    assert "0 of 1" in text


def test_a_run_that_is_missing():
    assert layouts._status(result(FOUND, FOUND), WANTED) == layouts.UNFINISHED


def test_a_file_of_other_settings_is_refused(tmp_path):
    given = Namespace(steps=2, json=str(tmp_path / "r.json"))
    assert layouts.begun(given, ABOUT)["rows"] == []
    (tmp_path / "r.json").write_text(json.dumps(layouts.begun(given, ABOUT) | {"rows": [{"name": "n"}]}))
    assert layouts.begun(given, ABOUT)["rows"] == [{"name": "n"}]
    for words, changed, about in (
        ("steps: 2, now 3", {"steps": 3}, {}),
        ("hardware: h, now other", {}, {"hardware": "other"}),
    ):
        with pytest.raises(UsageError, match=f"has runs with other settings .{words}"):
            layouts.begun(Namespace(**vars(given) | changed), ABOUT | about)
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(UsageError, match="is no result of this command"):
        layouts.begun(given, ABOUT)


@pytest.mark.long
@pytest.mark.mpi(min_size=2)
def test_the_command_goes_on_where_it_stopped(mpi_world, capsys, tmp_path, monkeypatch):
    from commengine import Communicator

    file = mpi_world.bcast(tmp_path) / "r.json"
    some = [cell for cell in cells(["gpt"], ["fp32"]) if cell.kind != "layout" or cell.layout.tensor == 2]
    flags = ["--models", "gpt", "--precisions", "fp32", "--steps", "2", "--json", str(file)]
    with Communicator(mpi_world) as world:
        monkeypatch.setattr(layouts, "cells", lambda *_: iter(some[:2]))
        assert layouts.main(world, flags) == 0
        before = json.loads(file.read_text())["rows"]
        monkeypatch.setattr(layouts, "cells", lambda *_: iter(some))
        assert layouts.main(world, [*flags, "--seconds", "1e-9"]) == layouts.UNFINISHED
        assert json.loads(file.read_text())["rows"] == before
        assert layouts.main(world, flags) == layouts.UNFINISHED  # two ranks have no layouts of four
    if mpi_world.rank == 0:
        after = json.loads(file.read_text())["rows"]
        assert after[:2] == before and len(after) > 2
        assert {row["kind"] for row in after} == {"alone", "layout", "control alone", "control"}
        assert "WRONG" not in capsys.readouterr().out
