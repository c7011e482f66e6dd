"""bench.report: one page that holds everything, is well formed, and loads nothing."""

import base64
import json
import math
import os
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from bench import fit, report
from bench.collective_study.fitted_series import fits_of
from bench.report_page.page import SCRIPT
from bench.report_page.units import column
from tests.support import mpirun

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Checks that elements nest; collects tables, texts and addresses."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.texts, self.addresses, self.ids = [], [], [], [], set()
        self.values, self.folded, self.fold_of = [], 0, []
        self.feed(text)
        assert not self.open
        assert text.count("<script>") == 1 and f"<script>{SCRIPT}</script>" in text

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.addresses += [found[name] for name in ("src", "href") if name in found]
        self.ids.add(found.get("id"))
        assert tag not in ("link", "iframe")
        assert tag != "script" or not attributes  # the page's own, in the page
        self.values += [float(found["data-v"])] if "data-v" in found else []
        self.folded += tag == "details"
        if tag == "table":
            self.tables.append([])
            self.fold_of.append("details" in self.open)
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data
        self.texts.append(data)


def check_stands_alone(page):
    """Every address is in the page, and the drawings name none outside of themselves."""
    drawings = 0
    for address in page.addresses:
        assert address.startswith("data:image/") or address[1:] in page.ids, address
        if address.startswith("data:image/svg+xml;base64,"):
            text = base64.b64decode(address.partition(",")[2]).decode()
            assert "<!DOCTYPE" not in text and "<image" not in text and "url(http" not in text
            for element in ET.fromstring(text).iter():
                for name, value in element.attrib.items():
                    assert not name.endswith("href") or value.startswith("#"), value
            drawings += 1
    return drawings


def row(size, operation="all_reduce"):
    return {
        "operation": operation, "transport": "engine", "group": "world", "ranks": 2, "dtype": "float32", "redop": "sum",
        "root": None, "in_place": True, "bytes": size, "count": size // 4, "iterations": 9,
        "seconds": {"p50": 2e-6, "p95": 3e-6, "p99": 4e-6}, "ci": [1e-6, 3e-6], "converged": False,
        "algbw": 1e9, "busbw": 2e9, "wrong": 0,
    }  # fmt: skip


def test_page_holds_everything_and_loads_nothing(tmp_path):
    (tmp_path / "step.md").write_text(
        "# A <b>step</b>\n\n- command: `mpiexec <n>`\n- **two**\n  lines & more\n\nText [x](y.md).\n\n"
        "| a | b |\n|---|---:|\n| `1` | **2** |\n| <script>evil()</script> | 4 |\n\n    code < here\n"
    )
    (tmp_path / "step.png").write_bytes(PIXEL)
    rows = [row(size) for size in (8, 1024, 1 << 20)]
    (tmp_path / "cost.json").write_text(json.dumps({"format": 1, "command": "python -m x", "rows": rows}))
    segment = {"ranks": 2, "from_bytes": 0, "alpha": 2e-6, "beta": 1e-10}
    (tmp_path / "model.json").write_text(json.dumps({"format": 1, "collectives": {"all_reduce": [segment]}}))
    (tmp_path / "other.json").write_text('["</pre><script>"]')
    (tmp_path / "notes.txt").write_text("left alone")
    assert report.main([str(tmp_path)]) == 0
    found = Page((tmp_path / "report.html").read_text())
    heads = found.tables[0][0]  # cost, model, step: by name; the columns are those of the terminal
    assert heads[:6] == ["size", "count, elements", "type", "redop", "root", "time, us, p50"]
    assert [line[0] for line in found.tables[0][1:]] == ["8 B", "1 KB", "1 MB"]
    first = dict(zip(heads, found.tables[0][1], strict=True))
    assert [first[name] for name in ("time, us, p50", "p95, us", "p99, us")] == ["2.00", "3.00", "4.00"]
    assert (first["algbw"], first["busbw"], first["+-median, %"], first["calls"]) == ("1 GB/s", "2 GB/s", "50.0*", "9")
    assert (first["place"], first["transport"], first["#wrong"]) == ("in", "engine", "0") and "min, us" not in heads
    assert found.values[:3] == [8.0, 1e9, 2e9]  # by which a click on a heading sorts
    assert found.tables[1][1] == ["all_reduce", "2", "0 B", "2", "10"]
    assert found.tables[2] == [["a", "b"], ["1", "2"], ["<script>evil()</script>", "4"]]
    text = "".join(found.texts)
    assert "A <b>step</b>" in text and "mpiexec <n>" in text and "code < here" in text and '["</pre><script>"]' in text
    assert "left alone" not in text
    check_stands_alone(found)
    assert base64.b64encode(PIXEL).decode() in (tmp_path / "report.html").read_text()


def test_fits_are_drawn_and_other_json_is_tabled(tmp_path):
    """As bench.fit, bench.predict --plan and bench.replay write them."""
    rows = [row(size) | {"seconds": {"p50": 1e-6 + size * 1e-9}, "ci": None} for size in (8, 1024, 1 << 14, 1 << 20)]
    (tmp_path / "cost.json").write_text(json.dumps({"format": 1, "rows": rows}))
    model = tmp_path / "model.json"
    assert fit.main([str(tmp_path / "cost.json"), "--output", str(model)]) == 0
    data = json.loads(model.read_text())
    data["series"][0]["segments"][0]["alpha_interval"][1] = None
    (drawn,) = fits_of(data)
    assert drawn.fit.segments[0].alpha_interval[1] == math.inf and drawn.fit.seconds(1024) == pytest.approx(2.024e-6)
    assert drawn.series.seconds.tolist() == [one["seconds"]["p50"] for one in rows]
    (tmp_path / "plan.json").write_text(
        json.dumps(
            {
                "candidates": [{"tensor": 2, "step_s": 0.123456789, "memory_bytes": {"a": 3 << 20}, "steps": [1, 9, 2]}]
                * 120
            }
        )
    )
    (tmp_path / "replay.json").write_text(json.dumps({"ranks": [[{"a|b": "c|d"}], [{"a|b": "e"}]]}))
    assert report.main([str(tmp_path)]) == 0
    found = Page((tmp_path / "report.html").read_text())
    assert check_stands_alone(found) == 2
    fits, sizes, plan, *replays = found.tables[1:]
    assert fits[0][:5] == ["operation", "ranks", "measured as", "from bytes", "alpha, us"] and len(sizes) == 5
    assert plan[:2] == [
        ["tensor", "step_s, ms", "memory_bytes_a, size", "steps_median"], ["2", "123.5", "3 MB", "2"]
    ] and len(plan) == 121  # fmt: skip
    assert found.fold_of[3] and not found.fold_of[1]  # the long one is folded
    assert [one[1][0].replace(chr(92), "") for one in replays] == ["c|d", "e"]


@pytest.mark.parametrize(
    ("name", "values", "head", "cells"),
    [
        ("step_s", [1.5e-6, 2e-3], "step_s, ms", ["0.0015", "2"]),  # the median decides: 1.0 ms
        ("seconds_p50", [1e-5, None], "seconds_p50, us", ["10", ""]),
        ("busbw", [2.5e9, 1e6], "busbw, GB/s", ["2.5", "0.001"]),
        ("flops_per_device", [39e12], "flops_per_device, TFLOP/s", ["39"]),
        ("communication_share", [0.256], "communication_share, %", ["25.6"]),
        ("bytes", [1536, 1 << 30], "bytes, size", ["1.5 KB", "1 GB"]),
        ("heads", [16, 1234567], "heads", ["16", "1,234,567"]),
        ("recompute", ["full", None], "recompute", ["full", ""]),
        ("fits", [True, False], "fits", ["True", "False"]),
    ],
)
def test_columns_of_json_have_units_and_one_prefix(name, values, head, cells):
    found, shown, right = column(name, values)
    assert (found, [cell.shown for cell in shown]) == (head, cells)
    assert right == (not isinstance(values[0], str | bool))
    numbers = [value for value in values if isinstance(value, float)]
    assert [cell.value for cell in shown if cell.value is not None][: len(numbers)] == numbers or not right


def test_each_picture_stands_once(tmp_path):
    """A drawing that a command has made is not drawn anew, and one in two formats is shown in one of them."""
    rows = [row(size) | {"seconds": {"p50": 1e-6 + size * 1e-9}, "ci": None} for size in (8, 1024, 1 << 14, 1 << 20)]
    results = tmp_path / "cost.json"
    results.write_text(json.dumps({"format": 1, "command": "python -m x --plot=here/line.svg", "rows": rows}))
    assert fit.main([str(results), "--output", str(tmp_path / "model.json"), "--plot", str(tmp_path / "fit.png")]) == 0
    (tmp_path / "line.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    for name in ("line.png", "copy.png", "again.png"):
        (tmp_path / name).write_bytes(PIXEL)
    assert report.main([str(tmp_path)]) == 0
    found = Page((tmp_path / "report.html").read_text())
    images = [address for address in found.addresses if address.startswith("data:")]
    assert len(images) == len(set(images)) == 3  # fit.png, line.svg and one of the two equal pixels
    check_stands_alone(found)


def test_long_code_is_folded_and_empty_lines_in_it_stay(tmp_path):
    (tmp_path / "a.md").write_text("Before\n\n```\n" + "\n\n".join(f"line {n}" for n in range(30)) + "\n```\n\nAfter\n")
    assert report.main([str(tmp_path)]) == 0
    found = Page((tmp_path / "report.html").read_text())
    assert found.folded == 1 and "59 lines" in found.texts and "After" in found.texts
    assert "line 0\n\nline 1" in "".join(found.texts)


def test_the_answers_of_a_study_stand_first_and_once(tmp_path):
    answers = [{"question": "How & why?", "answer": "| a | b |\n|---|---:|\n| x | 1 |\n\nSo."}]
    study = {"kind": "study", "format": 1, "title": "Here", "about": "now", "answers": answers}
    (tmp_path / "study.json").write_text(json.dumps(study))
    (tmp_path / "study.md").write_text("# Here\n\nnot shown twice\n")
    (tmp_path / "notes.md").write_text("# Notes\n")
    assert report.main([str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    found = Page(text)
    assert found.tables == [[["a", "b"], ["x", "1"]]] and "How & why?" in found.texts
    assert text.index("How &amp; why?") < text.index("Notes") and "twice" not in text


def test_the_projects_own_results(tmp_path):
    folder = mpirun.ROOT / "bench" / "results"
    assert report.main([str(folder), "--output", str(tmp_path / "page.html")]) == 0
    found = Page((tmp_path / "page.html").read_text())
    check_stands_alone(found)
    assert len(found.tables) >= 3 and all(len(line) == len(one[0]) for one in found.tables for line in one)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (None, "", "no results: there is no .md, .json"),
        ("a.json", "{", "a.json: not JSON: Expecting"),
        ("a.json", '{"format": 1, "rows": [{}]}', "a.json: rows[0]: 'operation' is missing"),
        (
            "a.json",
            '{"collectives": {"all_reduce": [{"ranks": 2, "from_bytes": 0, "alpha": 1}]}}',
            "a.json: cannot be shown: 'beta' is missing",
        ),
    ],
)
def test_bad_folder_is_one_clear_error(name, text, message, tmp_path, capsys):
    if name:
        (tmp_path / name).write_text(text)
    for folder, words in ((tmp_path, message), (tmp_path / "nowhere", "not a folder")):
        with pytest.raises(SystemExit) as ended:
            report.main([str(folder)])
        assert ended.value.code == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_a_damaged_file_gets_a_note_and_the_rest_is_shown(tmp_path, capsys):
    (tmp_path / "broken.json").write_text('{"format": 1, "rows": [{')
    (tmp_path / "study.json").write_text("{")
    (tmp_path / "lacking.md").write_text("# Lacking\n\nits text\n")
    (tmp_path / "lacking.json").write_text('{"format": 1, "rows": [{}]}')
    (tmp_path / "whole.md").write_text("# Whole\n\n| a |\n|---|\n| 1 |\n")
    assert report.main([str(tmp_path)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert [name in line for name, line in zip(("broken", "lacking", "study"), told, strict=True)] == [True] * 3
    found = Page((tmp_path / "report.html").read_text())
    text = "".join(found.texts)
    assert found.tables == [[["a"], ["1"]]] and "its text" in text
    assert "broken.json: not JSON" in text and "lacking.json: rows[0]: 'operation' is missing" in text


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_traceback(tmp_path):
    """As `| head` does: standard output is a pipe that nobody reads."""
    rows = [row(8 << (k % 18), f"operation_{k // 18}") | {"ci": None} for k in range(18 * 20)]
    (tmp_path / "cost.json").write_text(json.dumps({"format": 1, "rows": rows}))
    reading, writing = os.pipe()
    os.close(reading)
    try:
        words = [sys.executable, "-m", "bench.fit", str(tmp_path / "cost.json")]
        done = subprocess.run(
            words, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100, cwd=mpirun.ROOT, check=False
        )
    finally:
        os.close(writing)
    assert done.returncode == 1 and done.stderr == ""
