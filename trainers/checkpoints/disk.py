"""Changes to files that survive a crash: each is on disk when its function returns.

All changes that checkpoints make to files go through this module.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: errors that mean that there is no room on the disk, or not for this user
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RangeWriter(contextlib.AbstractContextManager["RangeWriter"]):
    """Writes byte ranges of one file, of which other processes write other ranges at the same time.

    It never reads: a client of NFS that reads part of a page may write the whole page back.

    problem: the first error, with the file's name, after which nothing more is written. It is kept and not raised,
    because the ranks of a group go on with their exchanges and tell each other at the end. Without a problem the file
    is on disk when the ``with`` block has ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: OSError | None = None
        self._file = -1
        with self._kept():
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def write(self, start: int, data: Any) -> None:
        """Write ``data``, a contiguous buffer, from byte ``start`` on."""
        left = memoryview(data).cast("B")
        with self._kept():
            while self.problem is None and left:
                count = os.pwrite(self._file, left, start)
                start, left = start + count, left[count:]

    def __exit__(self, *exception: object) -> None:
        if self._file < 0:
            return
        with self._kept():
            if self.problem is None:
                os.fsync(self._file)
        with self._kept():
            os.close(self._file)  # NFS may tell of a full disk only here

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = self.problem or OSError(error.errno, error.strerror, str(self.path))


def write(path: Path, data: bytes) -> None:
    """Write a whole file, in place of an older one. Raises OSError with its name."""
    remove(path)  # a longer one would keep its end
    with RangeWriter(path) as file:
        file.write(0, data)
    if file.problem is not None:
        raise file.problem


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """The descriptor of a regular file, to read. A pipe in its place would wait for a writer. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file
    finally:
        os.close(file)


def size(path: Path) -> int:
    """The bytes of a file that other hosts have written, too: NFS asks the server when a file is opened."""
    with opened(path) as file:
        return os.fstat(file).st_size


def rewrite(path: Path, data: bytes) -> None:
    """Give a file new content: a kill leaves all of the old or all of the new. It writes ``NAME.tmp`` beside it first.

    Raises OSError that names a file; then nothing is left beside it.
    """
    beside = path.with_name(f"{path.name}.tmp")
    try:
        write(beside, data)
        replace(beside, path)
    except OSError:
        remove_if_possible(beside)
        raise


def make_empty(folder: Path) -> None:
    """Make an empty folder; what was in an older one of that name is removed."""
    remove(folder)
    folder.mkdir(parents=True)


def replace(source: Path, target: Path) -> None:
    """Rename ``source``; a file in the place of ``target`` is replaced at the same moment, a folder must be empty."""
    source.replace(target)
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it exists."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def remove_if_possible(path: Path) -> None:
    """Remove a file or folder that stands in nobody's way; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        remove(path)


def sync_folder(folder: Path) -> None:
    """Make sure that names inside ``folder`` are on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
