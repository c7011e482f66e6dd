"""Documents from files of plain text, paragraphs of text, or JSON lines, as a stream of pieces.

A file is never read whole. A piece is at most one document, and a large plain-text document is many pieces. For BERT a
piece is a sentence.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainers.files.reading import require_regular

# Characters that are read, or encoded, at a time: few enough that a batch of pieces keeps all threads busy.
BLOCK = 1 << 14
#: bytes of the longest line. A line is read whole, and tokens with their places take 140 times its bytes
LONGEST_LINE = 1 << 25
TOO_LONG = f": more than {LONGEST_LINE:,} bytes, the most that a line may have"
_CUT_BEFORE = frozenset(" \n\t\r")
#: ends of the names of files with a JSON object on each line; Megatron-LM calls its JSON lines .json
_JSON_LINES = (".jsonl", ".json")


class TextFileError(ValueError):
    """A file that cannot be read as text or JSON lines. The message names the file, and the line if there are lines."""


class TextPiece(NamedTuple):
    """A part of a document's text. last: the document ends with it. size: the bytes of the file that it came from."""

    text: str
    last: bool
    size: int


def is_json_lines(path: str | os.PathLike[str]) -> bool:
    """Whether a file's name says that it has a JSON object on each line."""
    return os.fspath(path).lower().endswith(_JSON_LINES)


def read_text(path: str | os.PathLike[str]) -> Iterator[TextPiece]:
    """The whole file as one document, character for character (a byte-order mark aside).

    Raises TextFileError if it is not UTF-8, OSError if it cannot be read.
    """
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        try:
            block = file.read(BLOCK)
            while block:
                following = file.read(BLOCK)
                yield TextPiece(block, not following, len(block.encode()))
                block = following
        except UnicodeDecodeError as error:
            raise TextFileError(f"{os.fspath(path)}: not UTF-8 text: {error.reason}") from error


def read_paragraphs(path: str | os.PathLike[str]) -> Iterator[TextPiece]:
    """A document for each run of lines between blank ones (empty or whitespace only).

    Lines keep their text and the newlines between them; the last newline is dropped. Raises as `read_text` does.
    """
    lines: list[str] = []
    size = 0
    for number, raw in _lines(path):
        line, size = _decode(path, number, raw), size + len(raw)
        if line.strip():
            lines.append(line)
        elif lines:
            yield TextPiece("".join(lines).rstrip("\r\n"), True, size)
            lines, size = [], 0
    if lines:
        yield TextPiece("".join(lines).rstrip("\r\n"), True, size)


def read_json_lines(path: str | os.PathLike[str], key: str) -> Iterator[TextPiece]:
    """A document for each line, which is an object with text under ``key``. Blank lines are skipped.

    Raises TextFileError, with the line's number, for any other line, and OSError if the file cannot be read.
    """
    for number, raw in _lines(path):
        line = _decode(path, number, raw)
        if line.strip():
            row = json_row(f"{os.fspath(path)}: line {number}", line, key)
            yield TextPiece(row[key], True, len(raw))


def read_lines(path: str | os.PathLike[str], key: str) -> Iterator[tuple[str, str]]:
    """(The file and the line, the text) of each line that is not blank, without the line's end.

    A line of a file of JSON lines (`is_json_lines`) is an object with the text under ``key``. Raises TextFileError,
    with the line's number, for a line that holds no text, InputFileError if there is no such regular file, and OSError.
    """
    is_json = is_json_lines(path)
    for number, raw in _lines(require_regular(path)):
        line, where = _decode(path, number, raw).rstrip("\r\n"), f"{os.fspath(path)}: line {number}"
        if line.strip():
            yield where, (json_row(where, line, key)[key] if is_json else line)


def json_row(where: str, line: str, key: str) -> dict[str, Any]:
    """The object of one line of JSON, which has text under ``key``.

    where: begins the message of the TextFileError that any other line raises.
    """
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
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which is no character
        raise TextFileError(f"{where}: {key!r} is not valid Unicode: {error.reason}") from error
    return row


def cut(pieces: Iterable[TextPiece], target: int = BLOCK) -> Iterator[TextPiece]:
    """The same documents in pieces of about ``target`` characters, cut where GPT-2's pattern ends a token.

    It cuts before a whitespace character that stands alone. The pattern gives this character to the token after it (a
    space joins the word, a newline stands alone), and so does an added token that takes the white space before it. A
    run of whitespace is not cut: where an added token follows, the whole run is one token. A text without such a
    character stays whole.
    """
    held, size = "", 0
    barren = 0  # there is no place to cut below this index, so that a text without whitespace is searched once
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
            yield TextPiece(held[begin:at], False, size)
            begin, size = at, 0
        held, barren = held[begin:], max(barren - begin, 0)
        if piece.last:
            yield TextPiece(held, True, size)
            held, size, barren = "", 0, 0


def whole(pieces: Iterable[TextPiece]) -> Iterator[TextPiece]:
    """The same documents, each as one piece."""
    texts: list[str] = []
    size = 0
    for piece in pieces:
        texts.append(piece.text)
        size += piece.size
        if piece.last:
            yield TextPiece("".join(texts), True, size)
            texts, size = [], 0


def sentences(documents: Iterable[TextPiece], language: str) -> Iterator[TextPiece]:
    """The same documents with each sentence as a piece, in the order of the text. Nothing but blank text is lost.

    documents: one piece each (`whole`). language: an ISO 639 code; one that `sentencex` does not know is split as
    English is. A document without a sentence is one empty piece.
    """
    from sentencex import segment  # an extra

    for document in documents:
        found = [sentence for sentence in segment(language, document.text) if not sentence.isspace()] or [""]
        for number, sentence in enumerate(found, start=1):
            yield TextPiece(sentence, number == len(found), document.size if number == 1 else 0)


def _is_cut(text: str, i: int) -> bool:
    # A character that str.isspace refuses is no whitespace to the pattern either. One that it accepts may be.
    return text[i] in _CUT_BEFORE and not text[i - 1].isspace() and not text[i + 1].isspace()


def _last_cut(text: str, start: int, stop: int) -> int | None:
    return next((i for i in range(min(stop, len(text) - 1) - 1, start - 1, -1) if _is_cut(text, i)), None)


def _first_cut(text: str, start: int) -> int | None:
    return next((i for i in range(start, len(text) - 1) if _is_cut(text, i)), None)


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    with Path(path).open("rb") as file:
        for number in itertools.count(1):
            if not (raw := file.readline(LONGEST_LINE + 1)):
                return
            if len(raw) > LONGEST_LINE:
                raise TextFileError(f"{os.fspath(path)}: line {number}{TOO_LONG}")
            yield number, raw


def _decode(path: str | os.PathLike[str], number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise TextFileError(f"{os.fspath(path)}: line {number}: not UTF-8 text: {error.reason}") from error
