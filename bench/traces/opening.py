"""Open the files of other tools' traces, perhaps compressed with gzip."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from commengine.files.reading import InputFileError, require_regular

_GZIP = b"\x1f\x8b"


def read_bytes(path: Path, most: int = -1) -> bytes:
    """The bytes of a regular file, decompressed if it is compressed. Raises InputFileError.

    most: how many bytes are read from its beginning; all of them if it is negative.
    """
    try:
        with require_regular(path).open("rb") as file:
            compressed = file.read(2) == _GZIP
            file.seek(0)
            return gzip.GzipFile(fileobj=file).read(most) if compressed else file.read(most)
    except (OSError, EOFError, zlib.error) as error:
        raise InputFileError(f"{path}: cannot be read: {str(error)[:200]}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a file of JSON holds, perhaps compressed. Raises InputFileError."""
    text = read_bytes(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{path}: not JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise InputFileError(f"{path}: not an object of JSON")
    return found


def begins_with(path: Path, *keys: bytes) -> bool:
    """Whether a file is an object of JSON with one of ``keys`` among its first bytes, perhaps compressed."""
    first = read_bytes(path, 1 << 16)
    return first.lstrip().startswith(b"{") and any(key in first for key in keys)
