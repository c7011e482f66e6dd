"""Documents from files, as a stream of pieces: plain text, paragraphs of text, or JSON lines.

A file is never read whole; a piece is at most one document, and a large plain-text document is many.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# Characters read, or encoded, at a time. Small enough that a batch of pieces keeps all threads busy.
BLOCK = 1 << 14
_CUT_BEFORE = frozenset(" \n\t\r")


class TextFileError(ValueError):
    """A file that does not hold what it should; the message names it, and the line where there is one."""


class Piece(NamedTuple):
    """A run of a document's text. last: the document ends with it. size: bytes of the file behind it."""

    text: str
    last: bool
    size: int


def read_text(path: str | os.PathLike[str]) -> Iterator[Piece]:
    """The whole file as one document, character for character (a byte-order mark aside).

    Raises TextFileError where it is not UTF-8, OSError where it cannot be read.
    """
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        try:
            block = file.read(BLOCK)
            while block:
                following = file.read(BLOCK)
                yield Piece(block, not following, len(block.encode()))
                block = following
        except UnicodeDecodeError as error:
            raise TextFileError(f"{os.fspath(path)}: not UTF-8 text: {error.reason}") from error


def read_paragraphs(path: str | os.PathLike[str]) -> Iterator[Piece]:
    """A document for each run of lines between blank ones (empty or whitespace only).

    Lines keep their text and the newlines between them; the last newline goes. Raises as `read_text`.
    """
    lines: list[str] = []
    size = 0
    for number, raw in _lines(path):
        line, size = _decode(path, number, raw), size + len(raw)
        if line.strip():
            lines.append(line)
        elif lines:
            yield Piece("".join(lines).rstrip("\r\n"), True, size)
            lines, size = [], 0
    if lines:
        yield Piece("".join(lines).rstrip("\r\n"), True, size)


def read_json_lines(path: str | os.PathLike[str], key: str) -> Iterator[Piece]:
    """A document for each line: an object with text under ``key``. Blank lines are passed over.

    Raises TextFileError, with the line's number, where a line is anything else; OSError.
    """
    for number, raw in _lines(path):
        line = _decode(path, number, raw)
        if line.strip():
            yield Piece(_json_text(f"{os.fspath(path)}: line {number}", line, key), True, len(raw))


def _json_text(where: str, line: str, key: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TextFileError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise TextFileError(f"{where}: want a JSON object, got {type(row).__name__}")
    if key not in row:
        keys = ", ".join(map(repr, row)) or "none"
        raise TextFileError(f"{where}: no key {key!r}; the keys are {keys}")
    text = row[key]
    if not isinstance(text, str):
        raise TextFileError(f"{where}: {key!r} is {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which is no character
        raise TextFileError(f"{where}: {key!r} is not valid Unicode: {error.reason}") from error
    return text


def cut(pieces: Iterable[Piece], target: int = BLOCK) -> Iterator[Piece]:
    """The same documents in pieces of about ``target`` characters, cut where GPT-2's pattern ends a token.

    That is before the last whitespace character of a run. The pattern gives that character to what
    follows (a space joins the word, a newline stands alone) and the rest of the run to one piece of its own,
    and at the end of a text it does the same. A text without whitespace stays whole.
    """
    held, size = "", 0
    barren = 0  # no place to cut below this index: a text without whitespace is searched once
    for piece in pieces:
        held += piece.text
        size += piece.size
        begin = 0
        while len(held) - begin > target:
            stop = begin + target
            at = _last_cut(held, max(begin + 1, barren), stop) or _first_cut(held, max(stop, barren))
            if at is None:
                barren = len(held) - 1
                break
            yield Piece(held[begin:at], False, size)
            begin, size = at, 0
        held, barren = held[begin:], max(barren - begin, 0)
        if piece.last:
            yield Piece(held, True, size)
            held, size, barren = "", 0, 0


def whole(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same documents, one piece each."""
    texts: list[str] = []
    size = 0
    for piece in pieces:
        texts.append(piece.text)
        size += piece.size
        if piece.last:
            yield Piece("".join(texts), True, size)
            texts, size = [], 0


def _is_cut(text: str, i: int) -> bool:
    # What str.isspace refuses is no whitespace to the pattern either; what it accepts may be.
    return text[i] in _CUT_BEFORE and not text[i + 1].isspace()


def _last_cut(text: str, start: int, stop: int) -> int | None:
    return next((i for i in range(min(stop, len(text) - 1) - 1, start - 1, -1) if _is_cut(text, i)), None)


def _first_cut(text: str, start: int) -> int | None:
    return next((i for i in range(start, len(text) - 1) if _is_cut(text, i)), None)


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    with Path(path).open("rb") as file:
        yield from enumerate(file, start=1)


def _decode(path: str | os.PathLike[str], number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise TextFileError(f"{os.fspath(path)}: line {number}: not UTF-8 text: {error.reason}") from error
