"""The check for the C++ compiler that --compile needs."""

from __future__ import annotations

import os
import shutil
import sys

from commengine import UsageError


def require_compiler() -> None:
    """Raise UsageError unless this rank's machine has the C++ compiler that torch.compile calls."""
    command = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(command) is None:
        raise UsageError(
            f"--compile: needs a C++ compiler, and there is no {command} on PATH; install one, name it in CXX, or "
            "train without --compile"
        )
