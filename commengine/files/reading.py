"""Reading files that a user names: text and JSON, within limits, each fault in one line that names the file.

A file must be a regular one: a pipe would wait for a writer for ever, and a device may have no end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commengine.errors import UsageError

#: bytes of the largest file of settings, and of the largest file of results, that is read
SETTINGS_BYTES, RESULTS_BYTES = 1 << 18, 1 << 28
#: JSON and YAML have no larger integers here
LARGEST_INTEGER = 1 << 63


class InputFileError(ValueError):
    """A file that a user named and that cannot be used. The message begins with its name, and is one short line."""


def require_regular(path: str | os.PathLike[str]) -> Path:
    """``path``, which must be a regular file that this process may read. Raises InputFileError."""
    found = Path(path)
    try:
        exists = found.exists()
    except (OSError, ValueError) as error:  # a name that is too long, or that has a byte of 0
        raise InputFileError(f"{str(found)[:200]!r}: not the name of a file") from error
    if found.is_dir():
        raise InputFileError(f"{found}: is a folder, not a file")
    if not found.is_file():
        is_none = "is a pipe or a device; give a regular file" if exists else "there is no such file"
        raise InputFileError(f"{found}: {is_none}")
    if not os.access(found, os.R_OK):
        raise InputFileError(f"{found}: may not be read")
    return found


def read_text(path: str | os.PathLike[str], most: int = RESULTS_BYTES) -> str:
    """The text of a regular file of UTF-8 and at most ``most`` bytes. Raises InputFileError."""
    found = require_regular(path)
    try:
        with found.open("rb") as file:
            raw = file.read(most + 1)
        if len(raw) > most:
            raise InputFileError(f"{found}: has more than {most} bytes, the most that are read of such a file")
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{found}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise InputFileError(f"{found}: {error.strerror}") from error


def read_json(path: str | os.PathLike[str], most: int = RESULTS_BYTES) -> Any:
    """The value that a file of JSON holds. Raises InputFileError, also for an integer of more than 64 bits."""
    return _json(str(path), read_text(path, most))


def read_json_lines(path: str | os.PathLike[str], most: int = RESULTS_BYTES) -> list[Any]:
    """The value of each line of a file; empty lines are left out. Raises InputFileError, with the line's number."""
    lines = read_text(path, most).splitlines()
    return [_json(f"{path}: line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text, parse_int=integer)
    except RecursionError:
        raise InputFileError(f"{where}: not usable JSON: lists and objects within each other without end") from None
    except ValueError as error:
        raise InputFileError(f"{where}: not JSON: {str(error)[:200]}") from None


def integer(digits: str) -> int:
    """An integer of at most 64 bits. Raises ValueError for a larger one."""
    if len(digits) > 20 or not -LARGEST_INTEGER <= (value := int(digits)) < LARGEST_INTEGER:
        raise ValueError("an integer of more than 64 bits")
    return value


@contextmanager
def fault_in(where: str | Callable[[], str], most: int = 200) -> Iterator[None]:
    """Turn the error of code that meets other content than it reads into UsageError, which begins with ``where``.

    A UsageError and an InputFileError stay, because they name their place. most: characters of the error that are kept.
    """
    try:
        yield
    except (UsageError, InputFileError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{where if isinstance(where, str) else where()}: {what[:most]}") from error
