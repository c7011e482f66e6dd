"""Input files cut into blocks that different ranks read: JSON lines, paragraphs of text, or whole text files.

A block is a range of bytes. It has the documents that begin in it, so that each document is in exactly one block.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainers.data.text_files import is_json_lines
from trainers.data.text_input import TextInput


class Block(NamedTuple):
    """The documents that begin in bytes [begin, end) of a file."""

    path: str
    begin: int
    end: int


def blocks(text: TextInput, paths: Sequence[str], size: int) -> list[Block]:
    """The blocks of all files, of at most ``size`` bytes where a file can be cut. Raises OSError."""
    found = []
    for path in paths:
        length = Path(path).stat().st_size
        step = size if text.split_on_blank_lines or is_json_lines(path) else max(length, 1)
        found += [Block(path, begin, min(begin + step, length)) for begin in range(0, length, step)]
    return found


def row_line(row: dict[str, Any]) -> bytes:
    """A row as a line of JSON, newline included."""
    try:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # a value beside the text spells half of a surrogate pair
        return (json.dumps(row) + "\n").encode()
