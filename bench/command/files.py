"""The files that a command writes: their options, a check before anything runs, and the writing."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from bench.command.values import flag

PLOTS = (".png", ".svg", ".pdf")


def add_files(
    parser: ArgumentParser,
    *,
    output: str = "write the tables as markdown",
    json: str = "write every measured number",
    **others: str,
) -> None:
    """Add ``--output`` and ``--json``, and an option for each of ``others`` (such as csv, plot), with these helps."""
    for name, text in {"output": output, "json": json, **others}.items():
        parser.add_argument(flag(name), metavar="FILE", help=text)


def check_writable(plot: str | Path | None = None, **files: str | Path | None) -> None:
    """Check, before a measurement, that its files can be written. plot: a picture. files: others, by option.

    Raises ValueError that names the option and the file.
    """
    for name, file in {**files, "plot": plot}.items():
        if file is None:
            continue
        path, folder = Path(file), Path(file).parent
        if not folder.is_dir():
            raise ValueError(f"{flag(name)} {file}: there is no folder {folder}")
        try:
            path.stat()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ValueError(f"{flag(name)} {file}: {error.strerror}") from error
        if path.is_dir():
            raise ValueError(f"{flag(name)} {file}: is a folder, not a file")
        if path.exists() and not (path.is_file() or path.is_char_device()):  # a pipe would wait for a reader
            raise ValueError(f"{flag(name)} {file}: is no regular file")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ValueError(f"{flag(name)} {file}: cannot be written")
    if plot is not None:
        check_picture("plot", plot)


def check_picture(name: str, file: str | Path) -> None:
    """Raise ValueError unless the name of a picture ends in one of PLOTS. name: the option's attribute."""
    if Path(file).suffix not in PLOTS:
        raise ValueError(f"{flag(name)} {file}: the name ends in {', '.join(PLOTS[:-1])} or {PLOTS[-1]}")


def publish(
    text: str, result: dict[str, Any], *, output: str | Path | None, json_file: str | Path | None = None
) -> None:
    """Print a result's tables, and write them and its numbers to the files that were asked for."""
    print(text, end="" if text.endswith("\n") else "\n", flush=True)
    if output:
        Path(output).write_text(text, encoding="utf-8")
    if json_file:
        Path(json_file).write_text(json.dumps(result, indent=1), encoding="utf-8")
