"""SQuAD's files of both versions, and what is wrong with a damaged one."""

import copy
import json
from pathlib import Path

import pytest

from commengine.files.reading import InputFileError
from tests.support.data import DATA, needs
from tests.support.finetuning import toy_tasks
from trainers.finetuning.formats import file_of, read_squad, version_in

QUESTION = {"id": "q1", "question": "Who sat?", "answers": [{"text": "cat", "answer_start": 2}]}


def value(*changes: dict, context: object = "A cat sat.") -> dict:
    """A file with one question, with these changes to it."""
    question = copy.deepcopy(QUESTION)
    for change in changes:
        question |= change
    return {"data": [{"title": "T", "paragraphs": [{"context": context, "qas": [question]}]}]}


def read(folder: Path, content: object, version: str = "1.1", *, labelled: bool = True):
    path = folder / "file.json"
    path.write_text(json.dumps(content))
    return read_squad(path, version, labelled=labelled, located=labelled)


def test_a_question(tmp_path):
    contexts, (question,) = read(tmp_path, value())
    assert contexts == ["A cat sat."] and question == ("q1", "Who sat?", 0, (("cat", 2),), False, True)


def test_a_question_without_an_answer(tmp_path):
    for more in ({"answers": []}, {"plausible_answers": [], "answers": QUESTION["answers"]}):
        (question,) = read(tmp_path, value({"is_impossible": True} | more), "2.0").questions
        assert question.impossible and question.answers == () and question.labelled
    with pytest.raises(InputFileError, match="has no answers"):
        read(tmp_path, value({"is_impossible": True, "answers": []}))


def test_files_without_labels(tmp_path):
    content = value()
    del content["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    (question,) = read(tmp_path, content, labelled=False).questions
    assert not question.labelled and question.answers == ()
    with pytest.raises(InputFileError, match=r"data\[0\]\.paragraphs\[0\]\.qas\[0\]: has no answers"):
        read(tmp_path, content)


DAMAGED = {
    "a list": ([], "should be an object"),
    "no paragraphs": ({"data": [{"title": "T"}]}, r"data\[0\]\.paragraphs is missing"),
    "an article that is a text": ({"data": ["T"]}, r"data\[0\]='T': should be an object"),
    "no questions": ({"data": []}, "holds no questions"),
    "no context": ({"data": [{"paragraphs": [{"qas": []}]}]}, r"paragraphs\[0\]\.context is missing"),
    "a context that is a number": (value(context=3), r"context=3: should be a valid string"),
    "an answer elsewhere": (
        value({"answers": [{"text": "cat", "answer_start": 3}]}),
        r"qas\[0\]: 'cat' does not stand at character 3 of the context",
    ),
    "an empty answer": (
        value({"answers": [{"text": " ", "answer_start": 1}]}), r"qas\[0\]: its first answer is empty",
    ),
    "an answer without its place": (value({"answers": [{"text": "cat"}]}), "answer_start is missing"),
    "a place that is a text": (
        value({"answers": [{"text": "cat", "answer_start": "2"}]}), "answer_start='2': should be a valid integer",
    ),
    "answers that are a text": (value({"answers": "cat"}), "answers='cat': should be a valid array"),
    "no identity": (value({"id": 4}), "id=4: should be a valid string"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(tmp_path, name):
    content, message = DAMAGED[name]
    with pytest.raises(InputFileError, match=message) as error:
        read(tmp_path, content)
    assert str(error.value).startswith(str(tmp_path / "file.json"))


def test_the_place_of_an_answer_is_needed_for_training_only(tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(value({"answers": [{"text": "cat", "answer_start": 3}]})))
    assert read_squad(path, "1.1", labelled=True, located=False).questions[0].answers == (("cat", 3),)


def test_two_questions_of_one_identity_are_refused(tmp_path):
    """Where their predictions would be one; for training it is no matter."""
    content = value()
    content["data"] *= 2
    assert len(read(tmp_path, content).questions) == 2
    with pytest.raises(InputFileError, match=r"data\[1\].*: its id 'q1' is that of another one \(.*data\[0\]"):
        read_squad(tmp_path / "file.json", "1.1", labelled=True, located=False)


def test_versions_of_a_folder(tmp_path):
    assert version_in(tmp_path) == []
    toy_tasks.squad(tmp_path, "2.0")
    assert version_in(tmp_path) == ["2.0"]
    toy_tasks.squad(tmp_path, "1.1")
    assert version_in(tmp_path) == ["1.1", "2.0"]
    found = read_squad(file_of(tmp_path, "train", "2.0"), "2.0", labelled=True, located=True)
    assert {one.impossible for one in found.questions} == {True, False}


@needs("task-samples")
def test_the_real_files():
    for name, version in (("allennlp_squad", "1.1"), ("allennlp_squad2", "2.0")):
        found = read_squad(DATA / f"task-samples/{name}.json", version, labelled=True, located=True)
        assert len(found.questions) >= 5 and any(one.impossible for one in found.questions) == (version == "2.0")
