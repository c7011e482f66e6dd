"""MNLI and QQP as GLUE has them: pairs of sentences in tab-separated files, without quoting (Wang et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from trainers.files.reading import InputFileError, read_text

#: the label of a row that has none
NO_LABEL = -100

#: lines whose numbers a message names
_SHOWN = 8


class Pair(NamedTuple):
    """A row. identity: its first column, which predictions repeat. label: the number of its class, or NO_LABEL."""

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
            found.append(Pair(cells[0], first, second, columns.labels[label[0]] if label else NO_LABEL))
        elif skip:
            left_out.append(number)
        else:
            raise InputFileError(f"{path}: line {number}: {problem} (--skip-damaged-rows leaves such rows out)")
    if not found and left_out:
        raise InputFileError(f"{path}: all of its {len(left_out)} rows are damaged")
    if not found:
        raise InputFileError(f"{path}: holds no rows but its header")
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


def left_out_text(path: Path, lines: list[int]) -> str:
    """The sentence about lines that `read_pairs` left out."""
    shown = ", ".join(map(str, lines[:_SHOWN])) + (", ..." if len(lines) > _SHOWN else "")
    return f"{path}: {len(lines)} damaged rows are left out (lines {shown})"
