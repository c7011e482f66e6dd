"""docs/diagrams.py: the committed diagrams are those that it draws, they are valid, and pages show them."""

import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.support import documents
from tests.support.mpirun import ROOT

SCRIPT = runpy.run_path(str(ROOT / "docs" / "diagrams.py"))


def test_the_committed_diagrams_are_those_that_the_code_draws() -> None:
    assert SCRIPT["main"](["--check"]) == 0


def test_a_diagram_that_differs_or_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert SCRIPT["main"]([], tmp_path) == 0 and SCRIPT["main"](["--check"], tmp_path) == 0
    groups, other = tmp_path / "groups.svg", tmp_path / "f-and-g.svg"
    groups.write_text(groups.read_text().replace("stage 1", "stage 2"))
    other.unlink()
    assert SCRIPT["main"](["--check"], tmp_path) == 1
    said = capsys.readouterr().err
    assert str(groups) in said and str(other) in said and "communicators.svg" not in said
    assert SCRIPT["main"](["--draw"]) == 2


def test_diagrams_are_xml_without_anything_from_elsewhere_and_no_text_leaves_them() -> None:
    for draw in SCRIPT["DIAGRAMS"].values():
        root = ET.fromstring(draw())
        width = float(root.attrib["width"])
        assert "href" not in draw()
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            half = 4.0 * len(text.text or "")  # 14 pixels of a sans-serif: at most 8 a letter in the mean
            x = float(text.attrib["x"])
            middle = text.attrib["text-anchor"] == "middle"
            assert x - half * middle >= 0 and x + (half if middle else 1.8 * half) <= width, text.text


def test_the_diagram_of_groups_has_the_numbers_of_the_engine() -> None:
    drawn = SCRIPT["groups"]()
    for said in ("tensor group: 0, 1", "context group: 0, 2", "data group: 0, 4", "pipeline group: 0, 8"):
        assert f">{said}<" in drawn
    assert all(f">{rank}<" in drawn for rank in range(16))


def test_a_page_shows_a_diagram() -> None:
    shown = {Path(link).stem for page in documents.PAGES for link in documents.links(page) if link.endswith(".svg")}
    assert {"groups", "f-and-g", "communicators"} <= shown
