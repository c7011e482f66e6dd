"""The contest of the same bits: the grid is done in pieces, and the result says which runs differ."""

import json
from argparse import Namespace

import pytest

from bench.contest import __main__ as command
from bench.contest import same_bits
from bench.contest.parts.grid import ALONE, GridRun, cells
from bench.contest.parts.tiny_run import RunLayout
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
        rows.append(same_bits._row(cell, one, rows) | {"seconds": 1.0})
    return same_bits.compared({"settings": {"steps": 1}, "rows": rows}, WANTED)


def page(case):
    return "\n".join(same_bits.CONTEST.page(None, [case]))


def test_runs_that_are_alike_and_a_control_that_is_not():
    good = result(FOUND, FOUND, FOUND, FOUND | {"parameter.a": "y"})
    assert same_bits.CONTEST.status([good]) == 0
    text = page(good)
    assert "- 4 of 4 runs of 1 steps are done, in 4 s" in text and "ERROR" not in text
    assert "- 1 of 1 runs have all digests" in text
    assert f"| gpt, fp32 | 2 | 0 | `{good.numbers['rows'][0]['digest']}` |  |  |  | 1 of 1 |" in text
    assert "| 1 of 1 differ |" in text


def test_a_run_that_differs_is_named():
    wrong = result(FOUND, FOUND | {"steps": []}, FOUND, FOUND)
    assert same_bits.CONTEST.status([wrong]) == 1
    text = page(wrong)
    assert "- **ERROR: gpt, fp32, layout: TP 2, DP 1, sequence-parallel: 1 digests differ: steps" in text
    assert "- **ERROR: gpt, fp32, control: TP 2, DP 1: 0 digests differ: " in text
    assert "0 of 1" in text


def test_a_run_that_is_missing():
    assert same_bits.CONTEST.status([result(FOUND, FOUND)]) == same_bits.UNFINISHED


def test_a_file_of_other_settings_is_refused(tmp_path, monkeypatch):
    about = dict(ABOUT)
    monkeypatch.setattr(same_bits, "environment", lambda _: about)
    given = Namespace(steps=2, keep=str(tmp_path / "r.json"))
    assert same_bits.begun(given)["rows"] == []
    (tmp_path / "r.json").write_text(json.dumps(same_bits.begun(given) | {"rows": [{"name": "n"}]}))
    assert same_bits.begun(given)["rows"] == [{"name": "n"}]
    with pytest.raises(UsageError, match=r"has runs with other settings .steps\)"):
        same_bits.begun(Namespace(steps=3, keep=given.keep))
    about["hardware"] = "other"
    with pytest.raises(UsageError, match=r"has runs with other settings .hardware\)"):
        same_bits.begun(given)
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(UsageError, match="is no file of this contest"):
        same_bits.begun(given)


@pytest.mark.long
@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, only=True)
def test_the_command_goes_on_where_it_stopped(mpi_world, capsys, tmp_path, monkeypatch):
    from commengine import Communicator

    file = mpi_world.bcast(tmp_path) / "r.json"
    some = [cell for cell in cells(["gpt"], ["fp32"]) if cell.kind != "layout" or cell.layout.tensor == 2]
    flags = ["--models", "gpt", "--precisions", "fp32", "--steps", "2", "--keep", str(file)]
    with Communicator(mpi_world) as world:
        monkeypatch.setattr(same_bits, "cells", lambda *_: iter(some[:2]))
        assert command.run("same_bits", flags, world) == 0
        before = json.loads(file.read_text())["rows"]
        monkeypatch.setattr(same_bits, "cells", lambda *_: iter(some))
        assert command.run("same_bits", [*flags, "--seconds", "1e-9"], world) == same_bits.UNFINISHED
        assert json.loads(file.read_text())["rows"] == before
        assert command.run("same_bits", flags, world) == same_bits.UNFINISHED  # two ranks have no layouts of four
    if mpi_world.rank == 0:
        after = json.loads(file.read_text())["rows"]
        assert after[:2] == before and len(after) > 2
        assert {row["kind"] for row in after} == {"alone", "layout", "control alone", "control"}
        assert "ERROR" not in capsys.readouterr().out
