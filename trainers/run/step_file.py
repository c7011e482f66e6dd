"""The number of the step under way, in a file: `trainers.supervise` learns from it where a run crashed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class StepFile:
    """A file that holds the number of the last step that has begun. It costs a few microseconds a step.

    path: None for no file. The number outlives a crash of the process. It may be lost with the host, because nothing
    waits for the disk. A file that cannot be written is left out, because training does not depend on it.
    """

    def __init__(self, path: Path | None) -> None:
        self._handle: int | None = None
        if path is not None:
            with contextlib.suppress(OSError):
                self._handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)

    def begin(self, step: int) -> None:
        """Write that ``step``, from 1, begins."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._handle, b"%-20d\n" % step, 0)

    def close(self) -> None:
        """Close the file, which stays."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
