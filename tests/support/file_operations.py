"""The changes that a process makes to files, one after the other: what a crash or a full disk can come between."""

import os
import threading
from collections.abc import Callable
from typing import Any

#: functions of `os` that change files; `pathlib` and `shutil` call them, too
CHANGING = ("open", "write", "pwrite", "fsync", "ftruncate", "rename", "replace", "link", "mkdir", "unlink", "rmdir")


class FileOperations:
    """In a ``with`` block, calls ``before(number, name)`` before each change to a file, numbered from 1.

    Only of the main thread and of the one that writes a checkpoint; a thread that holds a lock's file touches it at any
    time. Opening a file to read it is no change. Python's own ``open`` is not seen: checkpoints do not write with it.
    """

    def __init__(self, before: Callable[[int, str], None]) -> None:
        self.count = 0
        self._before = before
        self._plain: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> "FileOperations":
        for name in CHANGING:
            self._plain[name] = getattr(os, name)
            setattr(os, name, self._watched(name, self._plain[name]))
        return self

    def __exit__(self, *exception: object) -> None:
        for name, plain in self._plain.items():
            setattr(os, name, plain)

    def _watched(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **options: Any) -> Any:
            reads = name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not reads and threading.current_thread().name in ("MainThread", "checkpoint"):
                self.count += 1
                self._before(self.count, name)
            return plain(*args, **options)

        return operation
