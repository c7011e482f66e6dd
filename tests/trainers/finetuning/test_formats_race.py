"""RACE's files: an article with its questions in each, and what is wrong with a damaged one."""

import json
from pathlib import Path

import pytest

from commengine.files.reading import InputFileError
from tests.support.finetuning import toy_tasks
from trainers.data.samples import IGNORED
from trainers.finetuning.formats import read_level

ARTICLE = {
    "article": "A cat sat.", "questions": ["Who _ ?", "Who sat?"], "answers": ["B", "D"],
    "options": [["a", "sat", "c", "d"], ["e", "f", "g", "the cat"]], "id": "1.txt",
}  # fmt: skip


def written(folder: Path, value: object) -> Path:
    (folder / "middle").mkdir(exist_ok=True)
    (folder / "middle" / "1.txt").write_text(json.dumps(value))
    return folder


def test_questions_and_options(tmp_path):
    first, second = read_level(written(tmp_path, ARTICLE), "middle", labelled=True)
    assert (first.file, first.article, first.label, second.label) == ("middle/1.txt", "A cat sat.", 1, 3)
    assert first.with_option(1) == "Who sat ?"
    assert second.with_option(3) == "Who sat? the cat"
    assert first._replace(question="___ and _").with_option(0) == "a and a"
    assert first._replace(options=("\\1",) * 4).with_option(0) == "Who \\1 ?"


def test_answers_may_be_missing_in_a_test_split_only(tmp_path):
    folder = written(tmp_path, {name: value for name, value in ARTICLE.items() if name != "answers"})
    assert [one.label for one in read_level(folder, "middle", labelled=False)] == [IGNORED] * 2
    with pytest.raises(InputFileError, match=r"1\.txt: has no answers"):
        read_level(folder, "middle", labelled=True)


def test_the_toy_files(tmp_path):
    toy_tasks.race(tmp_path / "race", 8)
    found = read_level(tmp_path / "race" / "train", "high", labelled=True)
    assert len(found) == 12 and all(one.options[one.label] == "yes" for one in found)


DAMAGED = {
    "an empty file": ("", "1.txt: Invalid JSON"),
    "a list": ([1], "should be an object"),
    "no article": ({"questions": []}, "article is missing"),
    "an article that is a number": (ARTICLE | {"article": 3}, "article=3: should be a valid string"),
    "no questions": (
        ARTICLE | {"questions": [], "options": [], "answers": []},
        r"questions=\[\]: .* at least 1 item",
    ),
    "fewer answers": (ARTICLE | {"answers": ["A"]}, "has 2 questions, 2 options and 1 answers"),
    "three options": (
        ARTICLE | {"options": [["a"] * 3, ["b"] * 4]},
        r"options\[0\]=.* at least 4 items",
    ),
    "an unknown answer": (ARTICLE | {"answers": ["A", "E"]}, r"answers\[1\]='E': should be 'A', 'B', 'C' or 'D'"),
    "a question that is no text": (
        ARTICLE | {"questions": ["a", None]},
        r"questions\[1\]=None: should be",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(tmp_path, name):
    value, message = DAMAGED[name]
    folder = written(tmp_path, value)
    if value == "":
        (folder / "middle" / "1.txt").write_text("")
    with pytest.raises(InputFileError, match=message) as error:
        read_level(folder, "middle", labelled=True)
    assert str(error.value).startswith(str(folder / "middle" / "1.txt"))


def test_a_folder_without_articles_is_refused(tmp_path):
    with pytest.raises(InputFileError, match=r"high: there is no \*.txt file"):
        read_level(tmp_path, "high", labelled=True)
    folder = written(tmp_path, ARTICLE)
    with pytest.raises(InputFileError, match=r"each \(--race-level middle leaves this level out\)"):
        read_level(folder, "high", labelled=True)
