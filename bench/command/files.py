"""The files that a command writes: their options, a check before anything runs, and the writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.command.values import flag
from trainers.files.writing import check_picture, check_writable
from trainers.options import OneLineParser, ValidRange

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

    The parser raises ValueError for a file that cannot be written.
    """
    for name, text in {"output": output, "json": json, **others}.items():
        parser.add_argument(flag(name), metavar="FILE", help=text, valid=writable(name))


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
    if output:
        Path(output).write_text(text, encoding="utf-8")
    if json_file:
        Path(json_file).write_text(json.dumps(result, indent=1), encoding="utf-8")


def replace_text(path: Path, text: str) -> None:
    """Write a file, all of it or nothing, so that a command that is killed leaves the older one."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def replace_json(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON file as `replace_text` writes a text."""
    replace_text(path, json.dumps(data, indent=1))
