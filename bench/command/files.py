"""The files that a command writes: their options, a check before anything runs, and the writing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commengine.files.writing import check_picture, check_writable
from commengine.options.declared import flag_of
from commengine.options.parser import OneLineParser
from commengine.options.ranges import ValidRange

#: the options that name pictures
PICTURES = ("plot", "timeline")


def add_files(
    parser: OneLineParser,
    *,
    output: str = "write the tables as markdown",
    json: str = "write every measured number",
    **others: str,
) -> None:
    """Add ``--output`` and ``--json``, and an option for each of ``others`` (such as csv, plot), with these helps.

    The parser raises ValueError for a file that cannot be written, and for one that another option names.
    """
    for name, text in {"output": output, "json": json, **others}.items():
        parser.add_argument(flag_of(name), metavar="FILE", help=text, valid=writable(name), file="written")


def writable(name: str) -> ValidRange:
    """The files that an option can write. name: its attribute, such as output; a plot or a timeline is a picture."""

    def holds(file: str) -> bool:
        """Whether an option's file can be written. The exception says why not."""
        check_writable(**{name: file})
        if name in PICTURES:
            check_picture(name, file)
        return True

    return ValidRange(holds, "cannot be written")


def publish(
    text: str, result: dict[str, Any], *, output: str | Path | None, json_file: str | Path | None = None
) -> None:
    """Print a result's tables, and write them and its numbers to the files that were asked for."""
    print(text, end="" if text.endswith("\n") else "\n", flush=True)
    write(text, result, output=output, json_file=json_file)


def write(text: str, result: dict[str, Any], *, output: str | Path | None, json_file: str | Path | None) -> None:
    """Write a result's tables and its numbers to the files that were asked for."""
    if output:
        Path(output).write_text(text, encoding="utf-8")
    if json_file:
        write_json(json_file, result)


class Kept:
    """Writes what a command has measured so far, so that one that is stopped or killed keeps it. On rank 0.

    write: writes the files with "complete": false. It is called with each new result, unless the time since the last
    call is less than RARELY times what that call took.
    """

    RARELY = 20.0

    def __init__(self, write: Callable[[], object]) -> None:
        self._write, self._next = write, 0.0

    def __call__(self) -> None:
        """There is a new result."""
        began = time.monotonic()
        if began >= self._next:
            self._write()
            now = time.monotonic()
            self._next = now + self.RARELY * (now - began)


def write_json(path: str | Path, result: dict[str, Any]) -> None:
    """Write a JSON file, all of it or nothing; into a device, such as /dev/stdout, as it is."""
    found = Path(path)
    if found.is_char_device():
        found.write_text(json.dumps(result, indent=1), encoding="utf-8")
    else:
        replace_json(Path(os.path.realpath(found)), result)


def write_unfinished(path: str | Path | None, result: dict[str, Any]) -> None:
    """Write what is there of a result, marked as not complete, if the command writes JSON to a file."""
    if path and not Path(path).is_char_device():
        write_json(path, result | {"complete": False})


def replace_text(path: Path, text: str) -> None:
    """Write a file, all of it or nothing, so that a command that is killed leaves the older one."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def replace_json(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON file as `replace_text` writes a text."""
    replace_text(path, json.dumps(data, indent=1))
