"""RACE's files: ``{train,dev,test}/{middle,high}/*.txt``, an article with its questions as JSON in each (Lai 2017)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from trainers.files.reading import InputFileError, read_json

from .pairs import NO_LABEL

LEVELS = ("middle", "high")
LETTERS = "ABCD"
CHOICES = len(LETTERS)
_BLANK = re.compile("_+")


class ChoiceQuestion(NamedTuple):
    """A question with CHOICES options. file: its article's, such as middle/1.txt. label: of the right one."""

    file: str
    article: str
    question: str
    options: tuple[str, ...]
    label: int

    def with_option(self, number: int) -> str:
        """The question with an option: in the place of each run of "_", or after the question if there is none."""
        option = self.options[number]
        filled, blanks = _BLANK.subn(lambda _: option, self.question)
        return filled if blanks else f"{self.question} {option}"


def read_level(folder: Path, level: str, *, labelled: bool) -> list[ChoiceQuestion]:
    """The questions of all articles in ``folder/level``, by the names of the files.

    labelled: a file must have answers. Raises InputFileError that names the file and what it lacks.
    """
    files = sorted((folder / level).glob("*.txt"))
    if not files:
        others = [other for other in LEVELS if other != level and any((folder / other).glob("*.txt"))]
        hint = f" (--race-level {others[0]} leaves this level out)" if others else ""
        raise InputFileError(f"{folder / level}: there is no *.txt file; RACE has an article in each{hint}")
    return [question for path in files for question in _read(path, f"{level}/{path.name}", labelled=labelled)]


def _read(path: Path, name: str, *, labelled: bool) -> list[ChoiceQuestion]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputFileError(f"{path}: want a JSON object with article, questions, options and answers")
    article = _field(path, value, "article", str)
    questions, options = (_field(path, value, key, list) for key in ("questions", "options"))
    answers = _field(path, value, "answers", list) if labelled or "answers" in value else [None] * len(questions)
    if not len(questions) == len(options) == len(answers):
        counts = f"{len(questions)} questions, {len(options)} options and {len(answers)} answers"
        raise InputFileError(f"{path}: has {counts}; each question needs its options and its answer")
    found = []
    for number, (question, choices, answer) in enumerate(zip(questions, options, answers, strict=True), start=1):
        where = f"{path}: question {number}"
        if not isinstance(question, str):
            raise InputFileError(f"{where}: is not text")
        if not (isinstance(choices, list) and len(choices) == CHOICES and all(isinstance(c, str) for c in choices)):
            raise InputFileError(f"{where}: its options must be {CHOICES} texts")
        if answer is not None and answer not in tuple(LETTERS):
            raise InputFileError(f"{where}: its answer is {str(answer)[:40]!r}; valid: {', '.join(LETTERS)}")
        label = NO_LABEL if answer is None else LETTERS.index(answer)
        found.append(ChoiceQuestion(name, article, question, tuple(choices), label))
    if not found:
        raise InputFileError(f"{path}: holds no questions")
    return found


def _field(path: Path, value: dict[str, Any], key: str, kind: type) -> Any:
    if key not in value:
        raise InputFileError(f"{path}: has no {key}; an article of RACE has article, questions, options and answers")
    if not isinstance(value[key], kind):
        raise InputFileError(f"{path}: its {key} must be {'text' if kind is str else 'a list'}")
    return value[key]
