"""The real CuPy binding over `libnccl.c`: its streams are those of `CudaStandIn`, its memory is the host's.

A test file that imports this module is skipped where CuPy or a C compiler is missing, or where another libnccl is
loaded. ``make test-cupy`` installs CuPy in a folder of its own and runs them.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from commengine.device.choice import loaded_nccl
from tests.support.device.cuda_stand_in import STREAMS, CudaStandIn, HostRuntime

SOURCE = Path(__file__).with_name("libnccl.c")
FLAGS = ["-O1", "-Wall", "-Wextra", "-Werror", "-fwrapv", "-fPIC", "-shared", "-pthread", "-Wl,-soname,libnccl.so.2"]


def load() -> ctypes.CDLL | str:
    """Build the library, and load it before CuPy looks for one. Return it, or the reason why it cannot be had."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: make test-cupy runs this"
    if not shutil.which("cc"):
        return "there is no C compiler (cc)"
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"commengine-tests-{os.getuid()}-{key}")
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / "libnccl.so.2"
    if not built.exists():  # every rank may build it; the last one replaces the others' equal file
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own, "built")
            subprocess.run(["cc", *FLAGS, "-o", str(made), str(SOURCE)], check=True)
            made.replace(built)
    if others := [path for path in loaded_nccl() if path != os.path.realpath(built)]:
        return f"another libnccl is loaded: {others[0]}"
    return ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)


found = load()
if isinstance(found, str):
    pytest.skip(found, allow_module_level=True)
_C: ctypes.CDLL = found
_C.run.argtypes = (ctypes.c_long,)

import cupy  # noqa: E402  it binds the library that is loaded
from cupy.cuda import nccl  # noqa: E402

if not nccl.available:
    pytest.skip("CuPy was imported before, without an NCCL", allow_module_level=True)


class Launch:
    """Calls that NCCL launches at once on one stream. before: the launch that has to be reached first, if any."""

    last: Launch | None = None

    def __init__(self, stream: Any, number: int) -> None:
        self.stream, self.number, self.reached = stream, number, False
        self.before = Launch.last if _integer("ordered").value == 1 else None
        Launch.last = self
        stream.put(self.run, self)

    def run(self) -> None:
        if self.before is not None:
            self.before.reach()
        self.reached, self.before = True, None
        if _C.run(self.number):
            raise AssertionError(_text("said"))

    def reach(self) -> None:
        if not self.reached:
            self.stream.run(self)


def _integer(name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(_C, name)


def _text(name: str) -> str:
    return ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(_C, name))).decode()


_launched = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long)(
    lambda stream, number: Launch(STREAMS[stream], number) and None
)
_current_device = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: CudaStandIn.current_device_of_thread())
ctypes.c_void_p.in_dll(_C, "launched").value = ctypes.cast(_launched, ctypes.c_void_p).value
ctypes.c_void_p.in_dll(_C, "current_device").value = ctypes.cast(_current_device, ctypes.c_void_p).value


@dataclass
class Made:
    """An NCCL communicator of this process. number: in the order in which they were made."""

    number: int

    @property
    def outstanding(self) -> int:
        return int(_C.outstanding(self.number))

    @property
    def end(self) -> str:
        return ("", "destroy", "abort")[_C.end_of(self.number)]

    @property
    def device(self) -> int:
        return int(_C.device_of(self.number))

    def lose(self) -> None:
        """Let the other ranks of the communicator take this one for dead."""
        _C.lose(self.number)


class Library:
    """The library since this object was made. Names of calls are NCCL's, without "nccl".

    version: the one that ncclGetVersion tells.
    """

    def __init__(self, version: int) -> None:
        _integer("version").value, _integer("ordered").value = version, -1
        Launch.last = None
        self.fail("", 0)
        self.forget_calls()
        self._first = _integer("made").value

    @property
    def calls(self) -> list[str]:
        return _text("calls").split()

    def forget_calls(self) -> None:
        ctypes.c_char.in_dll(_C, "calls").value = b"\0"

    def fail(self, name: str, status: int) -> None:
        """Let the next call of this name return ``status``."""
        ctypes.memmove(ctypes.addressof(ctypes.c_char.in_dll(_C, "failing")), name.encode() + b"\0", len(name) + 1)
        _integer("failing_with").value = status

    @property
    def comms(self) -> list[Made]:
        return [Made(number) for number in range(self._first, _integer("made").value)]

    @property
    def ordered(self) -> bool:
        return _integer("ordered").value == 1

    @property
    def depth(self) -> int:
        return int(_C.group_depth())


@dataclass(frozen=True)
class CupyRuntime(HostRuntime):
    """A `Runtime` of the real binding."""

    library: Library


def cupy_runtime(devices: int = 1, version: int = 23203) -> CupyRuntime:
    return CupyRuntime(nccl, CudaStandIn(devices), cupy.cuda.runtime.runtimeGetVersion(), Library(version))


def broken() -> str:
    """The first call since the last question that no caller of NCCL may make; "" if there was none."""
    said = _text("broken")
    ctypes.c_char.in_dll(_C, "broken").value = b"\0"
    return said
