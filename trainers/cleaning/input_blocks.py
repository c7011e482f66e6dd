"""Input files cut into blocks that different ranks read: JSON lines, paragraphs of text, or whole text files.

A block is a range of bytes. It has the documents that begin in it, so that each document is in exactly one block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainers.data.text_files import LONGEST_LINE, TOO_LONG, TextFileError, is_json_lines, json_row, read_text, whole


@dataclass(frozen=True)
class Block:
    """The documents that begin in bytes [begin, end) of a file."""

    path: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Rows:
    """How files are read. key: of the text in a JSON line. paragraphs: in text files, each paragraph is a document."""

    key: str
    paragraphs: bool

    def is_cut(self, path: str) -> bool:
        """Whether a file's documents are smaller than the file."""
        return self.paragraphs or is_json_lines(path)

    def read(self, block: Block) -> Iterator[dict[str, Any]]:
        """The documents of a block as JSON objects with text under `key`.

        Raises TextFileError that names file and line, and OSError.
        """
        if is_json_lines(block.path):
            yield from self._read_json_lines(block)
        elif self.paragraphs:
            for text in _paragraphs(block):
                yield {self.key: text}
        else:
            for piece in whole(read_text(block.path)):
                if piece.text.strip():
                    yield {self.key: piece.text}

    def _read_json_lines(self, block: Block) -> Iterator[dict[str, Any]]:
        for begin, raw in _lines(block):
            if begin >= block.end:
                return
            try:
                line = _decode(begin, raw)
                if line.strip():
                    yield json_row("", line, self.key)
            except TextFileError as error:
                raise _at_line(block.path, begin, error) from error


def blocks(paths: Sequence[str], rows: Rows, size: int) -> list[Block]:
    """The blocks of all files, of at most ``size`` bytes where a file can be cut. Raises OSError."""
    found = []
    for path in paths:
        length = Path(path).stat().st_size
        step = size if rows.is_cut(path) else max(length, 1)
        found += [Block(path, begin, min(begin + step, length)) for begin in range(0, length, step)]
    return found


def _lines(block: Block) -> Iterator[tuple[int, bytes]]:
    """The lines, each with its first byte's offset, from the first line that begins in the block to the file's end."""
    with Path(block.path).open("rb") as file:
        at = block.begin
        if at:
            file.seek(at - 1)
            at += len(_readline(file, block.path, at)) - 1
        while raw := _readline(file, block.path, at):
            yield at, raw
            at += len(raw)


def _readline(file: BinaryIO, path: str, at: int) -> bytes:
    raw = file.readline(LONGEST_LINE + 1)
    if len(raw) > LONGEST_LINE:
        raise _at_line(path, at, TextFileError(TOO_LONG))
    return raw


def _paragraphs(block: Block) -> Iterator[str]:
    """The paragraphs whose last blank line before them begins in the block; also the first one of a file."""
    lines: list[str] = []
    mine = block.begin == 0  # whether the paragraph that begins next is of this block
    for begin, raw in _lines(block):
        try:
            line = _decode(begin, raw)
        except TextFileError as error:
            raise _at_line(block.path, begin, error) from error
        if line.strip():
            if mine:
                lines.append(line)
            continue
        if lines:
            yield "".join(lines).rstrip("\r\n")
            lines = []
        if begin >= block.end:
            return
        mine = True
    if lines:
        yield "".join(lines).rstrip("\r\n")


def _decode(begin: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if begin == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise TextFileError(f": not UTF-8 text: {error.reason}") from error


def _at_line(path: str, begin: int, error: TextFileError) -> TextFileError:
    """The same error with the file's name and the number of the line that begins at byte ``begin``."""
    number = 1
    with Path(path).open("rb") as file:
        left = begin
        while left:
            part = file.read(min(left, 1 << 20))
            number += part.count(b"\n")
            left -= len(part)
    return TextFileError(f"{path}: line {number}{error}")


def row_line(row: dict[str, Any]) -> bytes:
    """A row as a line of JSON, newline included."""
    try:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # a value beside the text spells half of a surrogate pair
        return (json.dumps(row) + "\n").encode()
