"""Documents from files of plain text, paragraphs of text, or JSON lines, as a stream of pieces.

A file is never read whole. A piece is at most one document, and a large plain-text document is many pieces. For BERT a
piece is a sentence.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from commengine.files.reading import require_regular

# Characters that are read, or encoded, at a time: few enough that a batch of pieces keeps all threads busy.
BLOCK = 1 << 14
#: bytes of the longest line. A line is read whole, and tokens with their places take 140 times its bytes
LONGEST_LINE = 1 << 25
#: a place to cut before: a whitespace character that stands alone; and the last one of a text
_CUT = re.compile(r"(?<=\S)[ \n\t\r](?=\S)")
_LAST_CUT = re.compile(rf"(?s:.*){_CUT.pattern}")
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

    Raises TextFileError if it is not UTF-8 or its lines end with CR alone, OSError if it cannot be read.
    """
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        try:
            block = file.read(BLOCK)
            if fault := _no_lines(block):
                raise TextFileError(f"{os.fspath(path)}: {fault}")
            while block:
                if "\0" in block:
                    raise TextFileError(f"{os.fspath(path)}: {_ZERO}")
                following = file.read(BLOCK)
                yield TextPiece(block, not following, len(block.encode()))
                block = following
        except UnicodeDecodeError as error:
            raise TextFileError(f"{os.fspath(path)}: not UTF-8 text: {error.reason}") from error


def read_paragraphs(path: str | os.PathLike[str], begin: int = 0, end: int | None = None) -> Iterator[TextPiece]:
    """A document for each run of lines between blank ones (empty or whitespace only).

    Lines keep their text and the newlines between them; the last newline is dropped. begin, end: only the paragraphs
    whose last blank line before them begins in these bytes, and at byte 0 also the first one. Raises as `read_text`.
    """
    lines: list[str] = []
    size = 0
    mine = begin == 0  # whether the paragraph that begins next is asked for
    for at, length, line in _lines(path, begin):
        size += length
        if line.strip():
            if mine:
                lines.append(line)
            continue
        if lines:
            yield TextPiece("".join(lines).rstrip("\r\n"), True, size)
            lines, size = [], 0
        if end is not None and at >= end:
            return
        mine = True
    if lines:
        yield TextPiece("".join(lines).rstrip("\r\n"), True, size)


def read_rows(
    path: str | os.PathLike[str], key: str, begin: int = 0, end: int | None = None, *, written: bool = False
) -> Iterator[tuple[dict[str, Any], int]]:
    """(The object, its bytes) of each line that begins in these bytes and is not blank. It has text under ``key``.

    written: the other values are `AsWritten`.

    Raises TextFileError, with the line's number, for any other line, and OSError if the file cannot be read.
    """
    for at, length, line in _lines(path, begin):
        if end is not None and at >= end:
            return
        if line.strip():
            try:
                row = json_row("", line, key)
                yield ({**as_written("", line), key: row[key]} if written and len(row) > 1 else row), length
            except TextFileError as error:
                raise _at_line(path, at, str(error)) from error


def read_json_lines(path: str | os.PathLike[str], key: str) -> Iterator[TextPiece]:
    """A document for each line, which is an object with text under ``key``. Raises as `read_rows` does."""
    for row, size in read_rows(path, key):
        yield TextPiece(row[key], True, size)


def read_lines(path: str | os.PathLike[str], key: str) -> Iterator[tuple[str, str]]:
    """(The file and the line, the text) of each line that is not blank, without the line's end.

    A line of a file of JSON lines (`is_json_lines`) is an object with the text under ``key``. Raises TextFileError,
    with the line's number, for a line that holds no text, InputFileError if there is no such regular file, and OSError.
    """
    is_json = is_json_lines(path)
    for number, (_, _, text) in enumerate(_lines(require_regular(path)), start=1):
        line, where = text.rstrip("\r\n"), f"{os.fspath(path)}: line {number}"
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


class AsWritten(str):
    """A value as it is spelled in JSON: 1e400 and 1E2 are other texts than what floats of Python make of them."""


def as_written(where: str, line: str) -> dict[str, Any]:
    """The values of a line that holds an object of JSON, by its keys, as they are spelled.

    where: begins the message of the TextFileError that NaN and Infinity raise, which are no JSON.
    """
    found: dict[str, Any] = {}
    at = _past_space(line, line.index("{") + 1)
    try:
        while line[at] != "}":
            key, at = _SPELLED.raw_decode(line, at)
            begin = _past_space(line, _past_space(line, at) + 1)
            _, at = _SPELLED.raw_decode(line, begin)
            found[key] = AsWritten(line[begin:at])
            at = _past_space(line, at)
            at = _past_space(line, at + 1) if line[at] == "," else at
    except ValueError as error:
        raise TextFileError(f"{where}: not JSON: {error}") from error
    return found


def _past_space(line: str, at: int) -> int:
    while line[at] in " \t\n\r":
        at += 1
    return at


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is a number of no JSON")


_SPELLED = json.JSONDecoder(parse_constant=_refuse)


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
            found = _LAST_CUT.match(held, max(begin + 1, barren), stop + 1) or _CUT.search(held, max(stop, barren))
            if found is None:
                barren = len(held) - 1
                break
            at = found.end() - 1
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


def _lines(path: str | os.PathLike[str], begin: int = 0) -> Iterator[tuple[int, int, str]]:
    """(Its first byte, its bytes, its text) of each line from the first that begins at byte ``begin`` or after it."""
    with Path(path).open("rb") as file:
        at = begin
        if at:
            file.seek(at - 1)
            at += len(_readline(file, path, at)) - 1
        while raw := _readline(file, path, at):
            try:
                text = raw.decode("utf-8-sig" if at == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise _at_line(path, at, f": not UTF-8 text: {error.reason}") from error
            if "\0" in text:
                raise _at_line(path, at, f": {_ZERO}")
            if at == 0 and (fault := _no_lines(text)):
                raise TextFileError(f"{os.fspath(path)}: {fault}")
            yield at, len(raw), text
            at += len(raw)


#: text in UTF-16 or UTF-32 without a mark is UTF-8, too, if it is ASCII: with zero bytes
_ZERO = "has zero bytes: text must be UTF-8, and this may be UTF-16; iconv -f UTF-16LE -t UTF-8 converts it"


def _no_lines(text: str) -> str:
    """What is wrong with a text, or the beginning of one, whose lines end with CR alone; "" if they do not."""
    alone = "\r" in text.rstrip("\r") and "\n" not in text
    return "its lines end with CR alone, as on old computers; tr '\\r' '\\n' converts it" if alone else ""


def _readline(file: BinaryIO, path: str | os.PathLike[str], at: int) -> bytes:
    raw = file.readline(LONGEST_LINE + 1)
    if len(raw) > LONGEST_LINE:
        raise _at_line(path, at, f": more than {LONGEST_LINE:,} bytes, the most that a line may have")
    return raw


def _at_line(path: str | os.PathLike[str], begin: int, said: str) -> TextFileError:
    """The error about the line that begins at byte ``begin``, with its number."""
    number = 1
    with Path(path).open("rb") as file:
        left = begin
        while left:
            part = file.read(min(left, 1 << 20))
            number += part.count(b"\n")
            left -= len(part)
    return TextFileError(f"{os.fspath(path)}: line {number}{said}")
