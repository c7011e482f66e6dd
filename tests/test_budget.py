"""tests/run fails above the seconds of tests/budget.json, and make lint above its lines; a busy machine gets more."""

import json
import runpy

import pytest

from tests.support import mpirun
from tests.support.running import budget

KNOWN = {
    "calibration": 2.0, "whole": {"usual": 100.0},
    "seconds": {"tests/a.py": {"0": 10.0, "2": 1.0}, "tests/b.py": {"0": 4.0}}, "lines": {},
}  # fmt: skip

CODE = '''"""Of the module,
of two lines."""

# a comment
import os  # and another


class A:
    """Of the class."""

    x = """a text
    that is code"""

    def f(self):
        "Of the function."
        return (
            1,
        )
'''


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings(tmp_path):
    assert budget.code_lines(CODE) == 8
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.py").write_text(CODE)
    assert list(budget.too_long({"lines": {"one": 8}}, tmp_path)) == []
    (line,) = budget.too_long({"lines": {"one": 5}}, tmp_path)
    assert line.startswith("one: 8 lines of code, 3 more than its budget in budget.json")
    (tmp_path / "docs" / "in").mkdir(parents=True)
    (tmp_path / "docs" / "in" / "page.md").write_text("# Three  words\n")
    (tmp_path / "README.md").write_text("two more")
    assert list(budget.too_long({"lines": {}, "words": {"docs": 5}}, tmp_path)) == []
    (line,) = budget.too_long({"lines": {}, "words": {"docs": 4}}, tmp_path)
    assert line.startswith("docs: 5 words, 1 more than its budget in budget.json; shorten")


def test_a_file_may_take_half_more_and_a_new_one_a_little():
    taken = {("tests/a.py", "0"): 16.9, ("tests/a.py", "2"): 3.6, ("tests/b.py", "0"): 30.0, ("tests/new.py", "0"): 6.0}
    assert budget.excess(KNOWN, taken, 1.0) == [("tests/b.py", "0"), ("tests/a.py", "2")]
    assert budget.excess(KNOWN, taken, 4.0) == []
    assert budget.excess(KNOWN, {("tests/new.py", "0"): 7.0, ("tests/b.py", "2"): 2.5}, 1.0) == [
        ("tests/new.py", "0"), ("tests/b.py", "2")
    ]  # fmt: skip


@pytest.mark.parametrize(("second", "fails"), [(24.0, True), (19.0, False)])
def test_only_a_second_excess_fails(monkeypatch, second, fails):
    over = runpy.run_path(str(mpirun.ROOT / "tests" / "run"))["over_budget"]
    monkeypatch.setattr(budget, "read", lambda: KNOWN)
    monkeypatch.setattr(budget, "calibrate", lambda: 2.0)
    asked = []
    again = lambda file, ranks: asked.append((file, ranks)) or second  # noqa: E731
    lines = over("usual", {("tests/b.py", "0"): 30.0, ("tests/a.py", "0"): 3.0}, 114.0, 1.0, again)
    assert asked == [("tests/b.py", "0")] and len(lines) == fails
    assert not fails or lines[0].startswith("tests/b.py (0 ranks): 30.0 s, and 24.0 s alone, where 20.0 s are its ")
    (line,) = over("usual", {}, 116.0, 1.0, again)
    assert line == "all tests: 116 s, where 115 s are their budget now (tests/budget.json)"
    assert over("usual", {}, 116.0, 2.0, again) == []


@pytest.mark.slow
def test_a_tally_makes_the_seconds_of_a_file(tmp_path):
    (tmp_path / "tally-2").write_text(
        "begun 0.000 tests/a.py::test_x\npassed 1.250 tests/a.py::test_x\nfailed 0.500 tests/a.py::test_y[a b]\n"
        "skipped 0.001 tests/b.py::test\nend 0.000 1\n"
    )
    taken = budget.seconds_of([tmp_path / "tally-2"])
    assert taken == {("tests/a.py", "2"): 1.75, ("tests/b.py", "2"): 0.001}
    found = json.loads(budget.written(taken, {"usual": 9.0}, 1.5, ["commengine"]))
    assert found["seconds"] == {"tests/a.py": {"2": 1.8}} and found["calibration"] == 1.5
    assert found["lines"]["commengine"] == budget.lines_of("commengine") > 5000
