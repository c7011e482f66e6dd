"""Documents of a rank that lie on disk, because they are larger than its memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Columns:
    """Equally long columns of numbers that grow, in memory. fields: the dtype of each column."""

    def __init__(self, **fields: str) -> None:
        self._dtypes = {name: np.dtype(dtype) for name, dtype in fields.items()}
        self._parts: dict[str, list[Array]] = {name: [] for name in fields}

    def append(self, **values: Array) -> None:
        """Add rows."""
        for name, dtype in self._dtypes.items():
            self._parts[name].append(values[name].astype(dtype, copy=False))

    def take(self, name: str) -> Array:
        """One column. It is removed, so that its memory is held once."""
        parts = self._parts.pop(name)
        return np.concatenate(parts) if parts else np.empty(0, self._dtypes[name])


class SpillFile:
    """Bytes that are appended, and then read at any place. The file has no name: it is gone when the process ends.

    Raises OSError, which names the folder, if the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        flags = getattr(os, "O_TMPFILE", None)
        try:
            self._fd = _nameless(folder) if flags is None else os.open(folder, flags | os.O_RDWR, 0o600)
        except OSError:
            self._fd = _nameless(folder)  # a file system without O_TMPFILE, such as NFS
        self.size = 0

    def append(self, data: bytes | Array) -> int:
        """Append ``data``; return the offset of its first byte."""
        offset = self.size
        rest = memoryview(data if isinstance(data, bytes) else data.tobytes())
        while rest:
            try:
                written = os.pwrite(self._fd, rest, self.size)
            except OSError as error:
                raise OSError(f"--work-dir {self._folder}: {error.strerror}") from error
            self.size += written
            rest = rest[written:]
        return offset

    def read(self, offset: int, length: int) -> bytes:
        """The ``length`` bytes at ``offset``."""
        data = os.pread(self._fd, length, offset)
        while len(data) < length:
            more = os.pread(self._fd, length - len(data), offset + len(data))
            if not more:
                raise OSError(f"--work-dir {self._folder}: a spilled file ended early")
            data += more
        return data

    def close(self) -> None:
        """Give the disk's space back."""
        os.close(self._fd)


def _nameless(folder: Path) -> int:
    path = folder / f".prepare_corpus-{os.getpid()}-{os.urandom(4).hex()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    path.unlink()
    return fd


def chunks(sizes: Array, limit: int) -> Iterator[tuple[int, int]]:
    """Cut a sequence of things into runs [begin, end) whose ``sizes`` sum to at most ``limit``, or of one thing."""
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        before = int(ends[begin - 1]) if begin else 0
        end = max(int(np.searchsorted(ends, before + limit, side="right")), begin + 1)
        yield begin, end
        begin = end
