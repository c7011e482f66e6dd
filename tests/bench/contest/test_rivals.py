"""The tables of the contest of rivals from given rows."""

import json
import re

import pytest

from bench.collective_study.results import measurements
from bench.contest import __main__ as command
from bench.contest.rivals import CONTEST, cases_of, draw
from bench.transports import environments
from commengine import UsageError


def row(transport, seconds, *, nbytes=8, dtype="float32", wrong=0, state=None, iterations=100):
    return {
        "operation": "all_reduce", "transport": transport, "dtype": dtype, "bytes": nbytes, "ranks": 2, "wrong": wrong,
        "state": state, "iterations": iterations, "seconds": {"p50": seconds},
    }  # fmt: skip


def cells(*rows):
    return list(cases_of("all_reduce", measurements(rows)))


def page(tmp_path, *rows, skipped=()):
    """The page of a folder that has the results of one operation already."""
    found = {"rows": rows, "skipped": list(skipped), "rivals": {"intel": "impi-rt 2021.19.0"}, "date": "2026-11-24"}
    (tmp_path / "all_reduce.json").write_text(json.dumps(found))
    words = ["--folder", str(tmp_path), "--operations", "all_reduce"]
    given = command.read("rivals", words)
    return "\n".join(CONTEST.page(given, CONTEST.measure(given, None)))


def test_the_ratio_is_that_of_the_best_ways():
    (cell,) = cells(row("engine", 4e-6), row("shared@intel", 2e-6), row("intel", 1e-6), row("gloo", 9e-6))
    assert cell.numbers == {"bytes": 8, "best": ["shared@intel", "intel"], "ratio": 0.5}


def test_the_limit_is_no_rival():
    (cell,) = cells(row("engine", 4e-6), row("c-loop", 1e-9), row("gloo", 8e-6))
    assert cell.numbers["ratio"] == 2.0


def test_times_are_compared_within_one_state_of_the_machine():
    first = [row("engine", 4e-6, state="state 1"), row("intel", 3e-6, state="state 1")]
    first += [row("gloo", 9e-6, state="state 1")]
    second = [row("engine", 1e-6, state="state 2", iterations=5000), row("mpi4py", 2e-6, state="state 2")]
    (cell,) = cells(*first, *second)
    assert cell.facts["us"] == {
        "engine": "**4.00**", "mpi4py": "**2.00~**", "intel": "3.00", "gloo": "9.00", "rival / engine": "0.50",
    }  # fmt: skip
    assert cell.numbers["ratio"] == pytest.approx(
        0.5
    )  # of mpi4py, whose state was faster: it speaks against the engine


def test_a_time_of_the_engine_in_another_state_does_not_count():
    first = [row("engine", 4e-6, state="state 1"), row("intel", 3e-6, state="state 1")]
    (cell,) = cells(*first, row("shared", 1e-6, state="state 2"))
    assert cell.numbers["ratio"] == pytest.approx(0.75) and cell.facts["us"]["shared"] == "1.00~"


def test_a_rival_with_wrong_sums_has_no_time_and_one_line(tmp_path):
    text = page(tmp_path, row("engine", 4e-6), row("intel", 1e-6, wrong=3), row("gloo", 5e-6))
    assert "- all_reduce: intel gave 3 wrong elements of float32, so its times there do not count" in text
    assert "| all_reduce | float32 | 8 B | us | **4.00** | **5.00** | 1.25 |" in text
    assert "times as fast" not in text and "ERROR" not in text


def test_wrong_sums_of_the_engine_are_an_error(tmp_path):
    text = page(tmp_path, row("engine", 4e-6, wrong=3), row("intel", 1e-6))
    assert "- **ERROR: all_reduce: the engine gave 3 wrong elements**" in text
    assert "| all_reduce | float32 | 8 B | us | **1.00** | - |" in text


def test_every_loss_is_a_line(tmp_path):
    rows = [
        row("engine", 4e-6),
        row("intel", 1e-6),
        row("engine", 1e-3, nbytes=1 << 20),
        row("intel", 2e-3, nbytes=1 << 20),
    ]
    text = page(tmp_path, *rows)
    assert "- all_reduce, float32, 8 B: intel is 4.00 times as fast as engine" in text
    assert text.count("times as fast") == 1


def test_an_absent_rival_is_one_line(tmp_path):
    skipped = [{"transport": "oneccl", "reason": "is not installed here; make rivals installs it"}] * 3
    lines = page(tmp_path, row("engine", 4e-6), skipped=skipped).splitlines()
    assert lines.count("- not measured: oneccl: is not installed here; make rivals installs it") == 1
    assert "- oneccl: not installed" in lines and "- intel: impi-rt 2021.19.0" in lines


def test_the_picture_has_a_line_for_each_operation():
    rows = [row(name, seconds, nbytes=size) for size in (8, 64) for name, seconds in (("engine", 2e-6), ("gloo", 1e-6))]
    (axes,) = draw(cells(*rows)).axes
    assert axes.lines[0].get_label() == "all_reduce"
    assert list(axes.lines[0].get_ydata()) == [0.5, 0.5]


def test_a_rival_that_was_not_installed_says_how(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    with pytest.raises(UsageError, match="is not installed here; make rivals installs it"):
        environments.environment_of("intel")
    assert environments.versions() == {}


def test_every_environment_has_a_version():
    assert environments.VERSION_OF.keys() == environments.PACKAGES.keys()
    for name, package in environments.VERSION_OF.items():
        assert any(re.split("[><]", one)[0] == package for one in environments.PACKAGES[name])
