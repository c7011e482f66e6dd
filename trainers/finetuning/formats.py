"""The files of the tasks: pairs of sentences, questions with options, and questions whose answers are spans.

MNLI and QQP are tab-separated without quoting, as GLUE has them (Wang et al. 2019). RACE has an article with its
questions as JSON in each of ``{train,dev,test}/{middle,high}/*.txt`` (Lai et al. 2017). SQuAD has questions about
paragraphs, whose answers are spans of them, in versions 1.1 and 2.0 (Rajpurkar et al. 2016, 2018).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from commengine.files.reading import InputFileError, read_text
from commengine.files.schema import ReadPart, read_as
from trainers.data.samples import IGNORED

from .settings import LEVELS, VERSIONS

LETTERS = "ABCD"
CHOICES = len(LETTERS)
_BLANK = re.compile("_+")


class _Examination(ReadPart):
    """A file of RACE."""

    article: str
    questions: list[str] = Field(min_length=1)
    options: list[Annotated[list[str], Field(min_length=CHOICES, max_length=CHOICES)]]
    answers: list[Literal["A", "B", "C", "D"]] | None = None


class _Answer(ReadPart):
    text: str
    answer_start: int


class _Asked(ReadPart):
    id: str
    question: str
    answers: list[_Answer] = Field(default=[])
    is_impossible: bool = False


class _Paragraph(ReadPart):
    context: str
    qas: list[_Asked]


class _Article(ReadPart):
    paragraphs: list[_Paragraph]


class _SQuAD(ReadPart):
    """A file of SQuAD."""

    data: list[_Article]


class Pair(NamedTuple):
    """A row. identity: its first column, which predictions repeat. label: the number of its class, or IGNORED."""

    identity: str
    first: str
    second: str
    label: int


class PairColumns(NamedTuple):
    """The names of the columns that are read, as the header has them, in any case. labels: the number of each word."""

    first: str
    second: str
    label: str
    labels: Mapping[str, int]


MNLI = PairColumns("sentence1", "sentence2", "gold_label", {"contradiction": 0, "entailment": 1, "neutral": 2})
QQP = PairColumns("question1", "question2", "is_duplicate", {"0": 0, "1": 1})


def read_pairs(path: Path, columns: PairColumns, *, labelled: bool, skip: bool = False) -> tuple[list[Pair], list[int]]:
    """The rows of a file with a header, and the numbers of the lines that are left out, from 1.

    labelled: each row has a label; otherwise the file needs no column for it, and a label that is there is not read.
    skip: leave out rows with another number of columns than the header, an empty text or an unknown label. Otherwise
    such a row raises InputFileError, as do a missing column and a file without rows.
    """
    lines = read_text(path).split("\n")  # not splitlines: a text may hold other separators of lines
    names = [name.strip() for name in lines[0].split("\t")]
    header = [name.lower() for name in names]
    wanted = [columns.first, columns.second, *([columns.label] if labelled else [])]
    if not any(line.strip() for line in lines):
        raise InputFileError(f"{path}: is empty; its first line must name the columns, {', '.join(wanted)} among them")
    if missing := [name for name in wanted if name not in header]:
        there = ", ".join(names)[:200] or "nothing"
        raise InputFileError(f"{path}: its first line has no column {', '.join(missing)}; it has {there}")
    if twice := [name for name in wanted if header.count(name) > 1]:
        raise InputFileError(f"{path}: its first line has the column {', '.join(twice)} more than once")
    places = [header.index(name) for name in wanted]
    found, left_out = [], []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cells = line.rstrip("\r").split("\t")
        problem = _problem(cells, header, places, columns if labelled else None)
        if problem is None:
            first, second, *label = (cells[place].strip() for place in places)
            found.append(Pair(cells[0], first, second, columns.labels[label[0]] if label else IGNORED))
        elif skip:
            left_out.append(number)
        else:
            raise InputFileError(f"{path}: line {number}: {problem} (--skip-damaged-rows leaves such rows out)")
    if not found:
        said = f"all of its {len(left_out)} rows are damaged" if left_out else "holds no rows but its header"
        raise InputFileError(f"{path}: {said}")
    return found, left_out


def _problem(cells: list[str], header: list[str], places: list[int], labelled: PairColumns | None) -> str | None:
    if len(cells) != len(header):
        return f"has {len(cells)} columns, the first line has {len(header)}"
    for place in places[:2]:
        if not cells[place].strip():
            return f"{header[place]} is empty"
    label = cells[places[2]].strip() if labelled else None
    if labelled and label not in labelled.labels:
        return f"{labelled.label} is {str(label)[:40]!r}; valid: {', '.join(labelled.labels)}"
    return None


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
    return [question for path in files for question in _questions(path, f"{level}/{path.name}", labelled=labelled)]


def _questions(path: Path, name: str, *, labelled: bool) -> list[ChoiceQuestion]:
    found = read_as(path, _Examination)
    if labelled and found.answers is None:
        raise InputFileError(f"{path}: has no answers")
    letters = [None] * len(found.questions) if found.answers is None else found.answers
    if not len(found.questions) == len(found.options) == len(letters):
        counts = f"{len(found.questions)} questions, {len(found.options)} options and {len(letters)} answers"
        raise InputFileError(f"{path}: has {counts}; each question needs its options and its answer")
    return [
        ChoiceQuestion(name, found.article, asked, tuple(options), LETTERS.index(answer) if answer else IGNORED)
        for asked, options, answer in zip(found.questions, found.options, letters, strict=True)
    ]


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
    for number, article in enumerate(read_as(path, _SQuAD).data):
        for place, paragraph in enumerate(article.paragraphs):
            contexts.append(paragraph.context)
            for asked, one in enumerate(paragraph.qas):
                at = f"{path}: data[{number}].paragraphs[{place}].qas[{asked}]"
                impossible = version == "2.0" and one.is_impossible
                answers = () if impossible else tuple((answer.text, answer.answer_start) for answer in one.answers)
                known = impossible or bool(answers)
                if labelled and not known:
                    raise InputFileError(f"{at}: has no answers{', and is not impossible' if version == '2.0' else ''}")
                if (other := seen.setdefault(one.id, at)) != at and not located:
                    raise InputFileError(f"{at}: its id {one.id[:40]!r} is that of another one ({other})")
                if located and answers:
                    _require_located(at, paragraph.context, *answers[0])
                questions.append(SpanQuestion(one.id, one.question, len(contexts) - 1, answers, impossible, known))
    if not questions:
        raise InputFileError(f"{path}: holds no questions")
    return SpanQuestions(contexts, questions)


def _require_located(where: str, context: str, text: str, start: int) -> None:
    if not text.strip():
        raise InputFileError(f"{where}: its first answer is empty, so there is nothing to learn")
    if start < 0 or context[start : start + len(text)] != text:
        raise InputFileError(f"{where}: {text[:40]!r} does not stand at character {start} of the context")
