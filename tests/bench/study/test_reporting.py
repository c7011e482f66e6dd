"""bench.study --only report: one page that holds everything, is well formed, and loads nothing."""

import base64
import json
import os
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from bench.report_page.page import SCRIPT
from bench.study import reporting
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
        self.folded, self.fold_of = 0, []
        self.feed(text)
        assert not self.open
        assert text.count("<script>") == 1 and f"<script>{SCRIPT}</script>" in text

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.addresses += [found[name] for name in ("src", "href") if name in found]
        self.ids.add(found.get("id"))
        assert tag not in ("link", "iframe")
        assert tag != "script" or not attributes  # the page's own, in the page
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
    """Every address is in the page."""
    for address in page.addresses:
        assert address.startswith("data:image/") or address[1:] in page.ids, address


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
    (tmp_path / "step.json").write_text('{"parts": [{"beside": "its markdown"}]}')
    (tmp_path / "cost.json").write_text(json.dumps({"rows": [row(size) for size in (8, 1024, 1 << 20)]}))
    (tmp_path / "other.json").write_text('["</pre><script>"]')
    (tmp_path / "notes.txt").write_text("left alone")
    assert reporting.main([str(tmp_path)]) == 0
    found = Page((tmp_path / "report.html").read_text())
    (first, *rows), step = found.tables  # cost, step: by name
    assert [dict(zip(first, one, strict=True))["bytes"] for one in rows] == ["8", "1024", "1048576"]
    shown = dict(zip(first, rows[0], strict=True))
    assert (shown["operation"], shown["seconds_p50"], shown["ci_low"], shown["root"]) == (
        "all_reduce", "2e-06", "1e-06", ""
    )  # fmt: skip
    assert step == [["a", "b"], ["1", "2"], ["<script>evil()</script>", "4"]]
    text = "".join(found.texts)
    assert "A <b>step</b>" in text and "mpiexec <n>" in text and "code < here" in text and '["</pre><script>"]' in text
    assert "its markdown" in text and "left alone" not in text
    check_stands_alone(found)
    assert base64.b64encode(PIXEL).decode() in (tmp_path / "report.html").read_text()


def test_lists_of_objects_in_json_are_tabled(tmp_path):
    """As bench.predict --plan and bench.replay write them."""
    one = {"tensor": 2, "step_s": 0.123456789, "memory_bytes": {"a": 3 << 20}, "steps": [1, 9, 2], "name": "a|*b*_c_"}
    (tmp_path / "plan.json").write_text(json.dumps({"candidates": [one] * 120}))
    (tmp_path / "replay.json").write_text(json.dumps({"ranks": [[{"a|b": "c|d"}], [{"a|b": "e"}]]}))
    (tmp_path / "short.md").write_text("| a |\n|---|\n| 1 |\n")
    assert reporting.main([str(tmp_path)]) == 0
    found = Page((tmp_path / "report.html").read_text())
    check_stands_alone(found)
    plan, *replays, short = found.tables
    assert plan[:2] == [
        ["tensor", "step_s", "memory_bytes_a", "steps_median", "name"], ["2", "0.1235", "3145728", "2", "a|*b*_c_"]
    ] and len(plan) == 121  # fmt: skip
    assert found.fold_of == [True, False, False, False] and "120 rows" in found.texts
    assert replays == [[["a|b"], ["c|d"]], [["a|b"], ["e"]]] and short == [["a"], ["1"]]
    assert {"candidates", "ranks 0", "ranks 1"} <= set(found.texts)


def test_each_picture_stands_once(tmp_path):
    """One in two formats is shown in one of them."""
    (tmp_path / "line.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    for name in ("line.png", "copy.png", "again.png"):
        (tmp_path / name).write_bytes(PIXEL)
    assert reporting.main([str(tmp_path)]) == 0
    found = Page((tmp_path / "report.html").read_text())
    images = [address for address in found.addresses if address.startswith("data:")]
    assert len(images) == len(set(images)) == 2
    check_stands_alone(found)


def test_long_code_is_folded_and_empty_lines_in_it_stay(tmp_path):
    (tmp_path / "a.md").write_text("Before\n\n```\n" + "\n\n".join(f"line {n}" for n in range(30)) + "\n```\n\nAfter\n")
    assert reporting.main([str(tmp_path)]) == 0
    found = Page((tmp_path / "report.html").read_text())
    assert found.folded == 1 and "59 lines" in found.texts and "After" in found.texts
    assert "line 0\n\nline 1" in "".join(found.texts)


def test_the_answers_of_a_study_stand_first_and_once(tmp_path):
    answers = [{"question": "How & why?", "answer": "| a | b |\n|---|---:|\n| x | 1 |\n\nSo."}]
    study = {"kind": "study", "format": 1, "title": "Here", "about": "now", "answers": answers}
    (tmp_path / "study.json").write_text(json.dumps(study))
    (tmp_path / "study.md").write_text("# Here\n\nnot shown twice\n")
    (tmp_path / "notes.md").write_text("# Notes\n")
    assert reporting.main([str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    found = Page(text)
    assert found.tables == [[["a", "b"], ["x", "1"]]] and "How & why?" in found.texts
    assert text.index("How &amp; why?") < text.index("Notes") and "twice" not in text


@pytest.mark.slow
def test_the_projects_own_results(tmp_path):
    folder = mpirun.ROOT / "bench" / "results"
    assert reporting.main([str(folder), "--output", str(tmp_path / "page.html")]) == 0
    found = Page((tmp_path / "page.html").read_text())
    check_stands_alone(found)
    assert len(found.tables) >= 3 and all(len(line) == len(one[0]) for one in found.tables for line in one)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (None, "", "no results: there is no .md, .svg"),
        ("a.json", "{", "a.json: not JSON: Expecting"),
        ("a.json", '[{"ci": 1}]', "a.json: cannot be shown: "),
    ],
)
def test_bad_folder_is_one_clear_error(name, text, message, tmp_path, capsys):
    if name:
        (tmp_path / name).write_text(text)
    for folder, words in ((tmp_path, message), (tmp_path / "nowhere", "not a folder")):
        with pytest.raises(SystemExit) as ended:
            reporting.main([str(folder)])
        assert ended.value.code == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_a_damaged_file_gets_a_note_and_the_rest_is_shown(tmp_path, capsys):
    (tmp_path / "broken.json").write_text('{"format": 1, "rows": [{')
    (tmp_path / "study.json").write_text("{")
    (tmp_path / "lacking.md").write_text("# Lacking\n\nits text\n")
    (tmp_path / "lacking.json").write_bytes(b"\xff")
    (tmp_path / "whole.md").write_text("# Whole\n\n| a |\n|---|\n| 1 |\n")
    assert reporting.main([str(tmp_path)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert [name in line for name, line in zip(("broken", "lacking", "study"), told, strict=True)] == [True] * 3
    found = Page((tmp_path / "report.html").read_text())
    text = "".join(found.texts)
    assert found.tables == [[["a"], ["1"]]] and "its text" in text
    assert "broken.json: not JSON" in text and "lacking.json: not UTF-8" in text


@pytest.mark.long
@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_traceback(tmp_path):
    """As `| head` does: standard output is a pipe that nobody reads."""
    rows = [row(8 << (k % 18), f"operation_{k // 18}") | {"ci": None} for k in range(18 * 20)]
    (tmp_path / "cost.json").write_text(json.dumps({"format": 1, "rows": rows}))
    reading, writing = os.pipe()
    os.close(reading)
    try:
        words = [sys.executable, "-m", "bench.study", "--only", "fit", str(tmp_path / "cost.json")]
        done = subprocess.run(
            words, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100, cwd=mpirun.ROOT, check=False
        )
    finally:
        os.close(writing)
    assert done.returncode == 1 and done.stderr == ""
