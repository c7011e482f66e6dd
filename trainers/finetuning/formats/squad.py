"""SQuAD's files, versions 1.1 and 2.0: questions about paragraphs, whose answers are spans of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainers.files.reading import InputFileError, read_json

VERSIONS = ("1.1", "2.0")


class SpanQuestion(NamedTuple):
    """A question about paragraph number ``context``.

    answers: (text, first character in the context) of each; empty where there is none. impossible: in version 2.0, the
    context does not answer the question. labelled: the file says what the answers are.
    """

    identity: str
    question: str
    context: int
    answers: tuple[tuple[str, int], ...]
    impossible: bool
    labelled: bool


class SpanQuestions(NamedTuple):
    """The content of a file. contexts: the text of each paragraph, which several questions share."""

    contexts: list[str]
    questions: list[SpanQuestion]


def file_of(folder: Path, split: str, version: str) -> Path:
    """The file of a split, "train", "dev" or "test", under its original name."""
    return folder / f"{split}-v{version}.json"


def version_in(folder: Path) -> list[str]:
    """The versions of which the folder has a file."""
    return [one for one in VERSIONS if any(file_of(folder, split, one).is_file() for split in ("train", "dev", "test"))]


def read_squad(path: Path, version: str, *, labelled: bool, located: bool) -> SpanQuestions:
    """The paragraphs and questions of a file.

    labelled: each question needs its answers; in version 2.0, ``is_impossible`` may stand in their place. located: the
    first answer must stand in the context where it says; otherwise, as predictions need, each question must have an
    identity of its own. Raises InputFileError that names the file, the question and what is wrong.
    """
    contexts: list[str] = []
    questions: list[SpanQuestion] = []
    seen: dict[str, str] = {}
    for where, paragraph in _paragraphs(path):
        contexts.append(_field(where, paragraph, "context", str))
        for number, one in enumerate(_field(where, paragraph, "qas", list), start=1):
            at = f"{where}, question {number}"
            if not isinstance(one, dict):
                raise InputFileError(f"{at}: want a JSON object with id, question and answers")
            question = _question(at, one, len(contexts) - 1, version, labelled=labelled)
            if (other := seen.setdefault(question.identity, at)) != at and not located:
                raise InputFileError(f"{at}: its id {question.identity[:40]!r} is that of another one ({other})")
            if located and question.answers:
                _require_located(at, contexts[-1], *question.answers[0])
            questions.append(question)
    if not questions:
        raise InputFileError(f"{path}: holds no questions")
    return SpanQuestions(contexts, questions)


def _paragraphs(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    value = read_json(path)
    if not isinstance(value, dict) or not isinstance(value.get("data"), list):
        raise InputFileError(f"{path}: want a JSON object with a list under 'data', as SQuAD has it")
    for number, article in enumerate(value["data"], start=1):
        where = f"{path}: article {number}"
        if not isinstance(article, dict):
            raise InputFileError(f"{where}: want a JSON object with a list under 'paragraphs'")
        for place, paragraph in enumerate(_field(where, article, "paragraphs", list), start=1):
            if not isinstance(paragraph, dict):
                raise InputFileError(f"{where}, paragraph {place}: want a JSON object with context and qas")
            yield f"{where}, paragraph {place}", paragraph


def _question(where: str, one: dict[str, Any], context: int, version: str, *, labelled: bool) -> SpanQuestion:
    identity, question = (_field(where, one, key, str) for key in ("id", "question"))
    impossible = version == "2.0" and one.get("is_impossible") is True
    known = "answers" in one or impossible
    if labelled and not known:
        raise InputFileError(f"{where}: has no answers")
    answers = _field(where, one, "answers", list) if "answers" in one and not impossible else []
    if known and not answers and not impossible:
        if labelled:
            hint = "" if version == "2.0" else "; version 1.1 has an answer for each question"
            raise InputFileError(f"{where}: its list of answers is empty, and it is not marked as impossible{hint}")
        known = False
    spans = tuple(_answer(where, answer) for answer in answers)
    return SpanQuestion(identity, question, context, spans, impossible, known)


def _answer(where: str, answer: Any) -> tuple[str, int]:
    if not isinstance(answer, dict):
        raise InputFileError(f"{where}: an answer must be a JSON object with text and answer_start")
    return _field(where, answer, "text", str), _field(where, answer, "answer_start", int)


def _require_located(where: str, context: str, text: str, start: int) -> None:
    if not text.strip():
        raise InputFileError(f"{where}: its first answer is empty, so there is nothing to learn")
    if start < 0 or context[start : start + len(text)] != text:
        raise InputFileError(f"{where}: {text[:40]!r} does not stand at character {start} of the context")


def _field(where: str, value: dict[str, Any], key: str, kind: type) -> Any:
    if key not in value:
        raise InputFileError(f"{where}: has no {key}")
    if type(value[key]) is not kind:
        words = {str: "text", list: "a list", int: "a whole number"}[kind]
        raise InputFileError(f"{where}: its {key} must be {words}")
    return value[key]
