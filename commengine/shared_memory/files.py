"""The files in which the ranks of a node share memory: without a name, or in /dev/shm for the moment of opening.

A file without a name (memfd) does not count against the size of /dev/shm, and nothing is left of it when its processes
are killed. The other ranks open it in /proc of the rank that made it. Where they may not, as in user namespaces of
their own (rootless containers), the ranks use a file in /dev/shm. It is empty until its name is gone.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .room import disk_left, memory_left

#: how the names begin; `commengine.startup.segments` removes files of such names that killed jobs left
PREFIX = "commengine-"


class Way(NamedTuple):
    """One way to share a file.

    create: makes an empty file on one rank; returns its descriptor and what the other ranks need to open it.
    open: opens it on another rank. opened: called on the first rank when all ranks have opened it.
    left: the bytes that may be reserved. step: as many bytes are reserved between two looks.

    ``create``, ``open`` and ``left`` raise OSError where this way does not work here.
    """

    create: Callable[[], tuple[int, tuple[str, str]]]
    open: Callable[[str, str], int]
    opened: Callable[[str], None]
    left: Callable[[], int]
    step: int

    def reserve(self, file: int, start: int, end: int, ranks: int = 1) -> int:
        """Reserve the bytes from ``start`` to ``end`` of the file, near this process; return how far it got.

        ranks: as many ranks of this node reserve as much. Other groups may reserve at the same time, so one look at
        the start would not do.
        """
        needed = (end - start) * ranks
        while start < end:
            length = min(self.step, end - start)
            try:
                if needed > self.left():
                    break
                os.posix_fallocate(file, start, length)
            except OSError:
                break
            start += length
            needed = length
        return start


def _create_nameless() -> tuple[int, tuple[str, str]]:
    if not hasattr(os, "memfd_create"):  # Pythons that were built for an old C library
        raise OSError("no os.memfd_create")
    name = PREFIX + secrets.token_hex(16)
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    return file, (f"/proc/{os.getpid()}/fd/{file}", f"/memfd:{name} (deleted)")


def _open_nameless(path: str, target: str) -> int:
    if str(Path(path).readlink()) != target:  # in another namespace the number is another process
        raise OSError(f"{path} is another file")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _create_named() -> tuple[int, tuple[str, str]]:
    path = f"/dev/shm/{PREFIX}{secrets.token_hex(16)}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), (path, "")


def _open_named(path: str, target: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


#: a look at the machine's memory takes 0.1 ms, one at /dev/shm a microsecond
NAMELESS = Way(_create_nameless, _open_nameless, lambda path: None, memory_left, 32 << 20)
NAMED = Way(_create_named, _open_named, os.unlink, disk_left, 1 << 20)

#: the ways in the order in which a group tries them
WAYS = (NAMELESS, NAMED)
