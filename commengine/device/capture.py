"""Asks whether a device is done, although another thread may capture a CUDA graph at that moment.

A thread's question about an event ends the captures of all other threads, with an error on both sides, unless the
asking thread has left that rule (CUDA's cuThreadExchangeStreamCaptureMode).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

#: CU_STREAM_CAPTURE_MODE_RELAXED: not THREAD_LOCAL, because without a watcher's thread the capturing thread itself asks
RELAXED = 2


def is_over(event: Any) -> bool:
    """Whether ``event`` is done, or will never be because the device has failed (its user is told so elsewhere)."""
    try:
        with _beside_a_capture():
            return bool(event.query())
    except RuntimeError as error:
        return "captur" not in str(error)  # a capture forbids the question, and says nothing about the event


@contextlib.contextmanager
def _beside_a_capture() -> Iterator[None]:
    """Let this thread ask inside of the block without ending captures; in vain if the driver is not loaded."""
    try:
        exchange = ctypes.CDLL("libcuda.so.1", os.RTLD_NOW | os.RTLD_NOLOAD).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        yield
        return
    mode = ctypes.c_int(RELAXED)
    exchange(ctypes.byref(mode))  # which now holds the mode before
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
