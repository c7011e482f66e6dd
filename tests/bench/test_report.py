"""bench.report: one page that holds everything, is well formed, and loads nothing."""

import base64
import json
import math
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from bench import fit, report
from bench.collective_study.fitted_series import fits_of
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
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.addresses += [found[name] for name in ("src", "href") if name in found]
        self.ids.add(found.get("id"))
        assert tag not in ("script", "link", "iframe")
        if tag == "table":
            self.tables.append([])
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
        "seconds": {"p50": 2e-6, "p95": 3e-6, "p99": 4e-6}, "ci": [1e-6, 3e-6], "algbw": 1e9, "busbw": 2e9, "wrong": 0,
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
    assert found.tables[0][0][:4] == ["operation", "transport", "group", "ranks"]  # cost, model, step: by name
    assert [line[7] for line in found.tables[0][1:]] == ["8", "1024", "1048576"]
    assert found.tables[0][1][9:] == ["2", "3", "4", "1", "2", "0"]
    assert found.tables[1][1] == ["all_reduce", "2", "0", "2", "10"]
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
        json.dumps({"candidates": [{"tensor": 2, "s": 0.123456789, "x": {"y": 1}}] * 120})
    )
    (tmp_path / "replay.json").write_text(json.dumps({"ranks": [[{"a|b": "c|d"}], [{"a|b": "e"}]]}))
    assert report.main([str(tmp_path)]) == 0
    found = Page((tmp_path / "report.html").read_text())
    assert check_stands_alone(found) == 2
    assert found.tables[2][:2] == [["tensor", "s"], ["2", "0.123457"]] and len(found.tables[2]) == 101
    assert "20 more rows" in found.texts
    assert [one[1][0].replace(chr(92), "") for one in found.tables[3:]] == ["c|d", "e"]


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
        ("a.json", '{"collectives": {"all_reduce": [{}]}}', "a.json: cannot be shown: 'beta' is missing"),
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
