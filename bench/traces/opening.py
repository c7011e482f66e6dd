"""Open the files of other tools' traces, perhaps compressed with gzip, within a limit of memory."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from trainers.files.reading import InputFileError, require_regular

#: bytes of the largest file that is read, decompressed
LARGEST = 1 << 30
_GZIP = b"\x1f\x8b"


def beginning(path: Path, most: int = 1 << 16) -> bytes:
    """The first bytes of a regular file, decompressed if it is compressed; b"" if they cannot be read."""
    try:
        return _read(path, most)
    except (OSError, EOFError, ValueError, zlib.error):
        return b""


def read_bytes(path: Path) -> bytes:
    """All bytes of a regular file, decompressed if it is compressed. Raises InputFileError."""
    try:
        found = _read(path, LARGEST + 1)
    except InputFileError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise InputFileError(f"{path}: cannot be read: {str(error)[:200]}") from None
    if len(found) > LARGEST:
        raise InputFileError(f"{path}: has more than {LARGEST} bytes, the most that are read of a trace")
    return found


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a file of JSON holds, perhaps compressed. Raises InputFileError."""
    try:
        found = json.loads(read_bytes(path))
    except RecursionError:
        raise InputFileError(f"{path}: not usable JSON: lists and objects within each other without end") from None
    except ValueError as error:
        if isinstance(error, InputFileError):
            raise
        raise InputFileError(f"{path}: not JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise InputFileError(f"{path}: not an object of JSON")
    return found


def _read(path: Path, most: int) -> bytes:
    with require_regular(path).open("rb") as file:
        compressed = file.read(2) == _GZIP
        file.seek(0)
        if not compressed:
            return file.read(most)
        with gzip.open(file) as unpacked:
            return unpacked.read(most)
