"""YAML files that users name: values have their types, and anything that is no plain mapping is one short line."""

from itertools import pairwise
from pathlib import Path

import pytest

from commengine.files import reading
from commengine.files.yaml_files import read_yaml
from tests.commengine.files.test_reading import message

BOMB = "a: &a [x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a: 1\na: 2", "line 2: the key 'a' is there twice"),
        ("a: {b: 1, b: 2}", "line 1: the key 'b' is there twice"),
        ("1: 2", "line 1: '1' is no key"),
        ("true: 2", "'True' is no key"),
        ("null: 2", "'None' is no key"),
        ("[a]: 2", "is no key"),
        ("{a: 1}: 2", "is no key"),
        (BOMB, "line 1: no anchors and aliases"),
        ("a: *b", "line 1: no anchors and aliases"),
        ("a: !!python/object/apply:os.system [ls]", "line 1: no tags"),
        ("!x a: 1", "line 1: no tags"),
        ("a: " + "[" * 50, "within each other"),
        ("a: " + "[" * 1000, "a.yaml: "),  # PyYAML from 6.0.4 on refuses it before we do
        ("- a\n- b", "want keys with values"),
        ("text", "want keys with values"),
        ("", "want keys with values"),
        ("a: 1\n---\nb: 2", "not YAML: but found another document in line 2"),
        ("a: [1", "not YAML"),
        ("a: \x01", "not YAML"),
        ("a:\tb: c", "not YAML"),
    ],
)
def test_yaml_of_the_wrong_shape(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "a.yaml").write_text(content)
    text = message(read_yaml, tmp_path / "a.yaml")
    assert text.startswith(f"{tmp_path / 'a.yaml'}: ") and problem in text


def test_yaml_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"a: {'x' * reading.SETTINGS_BYTES}")
    assert "has more than" in message(read_yaml, tmp_path / "a.yaml")


def test_yaml_values_have_their_types_or_stand_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1\nb: 1.5\nc: yes\nd: [010, x]\ne:\nf: {g: '1'}\nh: 2024-01-02\ni: 12:30\nj: ~\n")
    assert read_yaml(file) == {
        "a": 1, "b": 1.5, "c": True, "d": [10, "x"], "e": None, "f": {"g": "1"}, "h": "2024-01-02", "i": 750, "j": None,
    }  # fmt: skip
    assert read_yaml(file, as_written=True) == {
        "a": "1", "b": "1.5", "c": "yes", "d": ["010", "x"], "e": None, "f": {"g": "1"}, "h": "2024-01-02",
        "i": "12:30", "j": None,
    }  # fmt: skip
    file.write_text(f"a: {'9' * 5000}")
    assert "more than 64 bits" in message(read_yaml, file)
