"""A loop in C or C++ over collectives, compiled when it is asked for, and timed inside.

    python -m bench.peers.calls.compiled c_loop|oneccl CAPACITY     # with $BENCH_PEER_SOCKET, see obeying.py

The two sources are beside this file. oneCCL starts as a job of Intel's MPI, so its ranks take their numbers from MPI.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.peers.calls.obeying import serve
from bench.timing.sampling import Times
from bench.transports.environments import FOLDER, SOCKET
from bench.transports.in_process import ONCE, LocalCall, LocalTransport
from bench.transports.names import NEW
from bench.transports.operations import OPERATIONS, REDUCING, CollectiveCall
from commengine.mpi import load_mpi

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True)
class LoopSource:
    """A source, its compilers, and further words for them. job: its processes are ranks of a job of MPI."""

    file: str
    compilers: tuple[str, ...]
    words: tuple[str, ...] = ()
    job: bool = False


SOURCES = {
    "c_loop": LoopSource("c_loop.c", ("cc", "gcc", "clang")),
    "oneccl": LoopSource(
        "oneccl.cpp", ("c++", "g++", "clang++"),
        ("-std=c++17", f"-I{sysconfig.get_path('data')}/include", f"-L{sysconfig.get_path('data')}/lib",
         "-l:libccl.so.1", f"-Wl,-rpath,{sysconfig.get_path('data')}/lib"), True,
    ),
}  # fmt: skip


class CompileError(Exception):
    """There is no compiler, or it does not compile the source."""


def compiled(source: LoopSource) -> Path:
    """The shared library of a source, compiled once for its text and its compiler."""
    found = next((there for name in source.compilers if (there := shutil.which(name))), None)
    path = Path(__file__).with_name(source.file)
    if found is None:
        raise CompileError(f"needs a compiler for {source.file}: none of {', '.join(source.compilers)} is here")
    words = [found, "-O3", "-march=native", "-shared", "-fPIC", str(path), *source.words]
    key = hashlib.sha256(path.read_bytes() + " ".join(words).encode()).hexdigest()[:16]
    library = FOLDER / "compiled" / f"{path.stem}-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}.part")
        done = subprocess.run([*words, "-o", str(part)], capture_output=True, text=True, check=False)
        if done.returncode:
            first = (done.stderr.strip() or "?").splitlines()[0]
            raise CompileError(f"{found} does not compile {source.file}: {first}")
        part.replace(library)
    return library


class LoopCall(LocalCall):
    """A call that is repeated and timed in the loop."""

    def run(self, count: int) -> tuple[Times, Times]:
        if self.before is not None and count > 1:  # the loop writes nothing
            found = zip(*(self.run(1) for _ in range(count)), strict=True)
            starts, seconds = map(np.concatenate, found)
            return starts, seconds
        starts, seconds = np.empty(count), np.empty(count)
        if self.before is not None:
            self.before()
        double = ctypes.POINTER(ctypes.c_double)
        _checked(self.invoke(count, starts.ctypes.data_as(double), seconds.ctypes.data_as(double)))
        return starts, seconds


def _checked(problem: bytes | None) -> None:
    if problem:
        raise CompileError(problem.decode(errors="replace"))


class Compiled(LocalTransport):
    """A compiled loop, whose calls meet at a barrier of its own."""

    name = "loop"
    in_place_only = ()
    bound = LoopCall

    def __init__(self, name: str, rank: int, size: int, folder: str, capacity: int) -> None:
        self._library = ctypes.CDLL(str(compiled(SOURCES[name])), mode=ctypes.RTLD_GLOBAL)
        self._library.open_group.restype = self._library.run_calls.restype = ctypes.c_char_p
        pointers = [ctypes.c_void_p(), ctypes.c_void_p()]
        given = (rank, size, folder.encode(), ctypes.c_size_t(capacity), *map(ctypes.byref, pointers))
        _checked(self._library.open_group(*given))
        of_bytes = ctypes.POINTER(ctypes.c_uint8)
        memory = (np.ctypeslib.as_array(ctypes.cast(one, of_bytes), (capacity,)) for one in pointers)
        super().__init__(rank, lambda: None, *map(torch.from_numpy, memory))

    def refuses(self, call: CollectiveCall, in_place: bool) -> str | None:
        if call.dtype not in DTYPE_CODES or (call.operation in REDUCING and call.redop != "sum"):
            return "the loop runs float32 and bfloat16, and sums only"
        if self.buffers == NEW:
            return ONCE
        return super().refuses(call, in_place)

    def _start(self, call: CollectiveCall, in_place: bool) -> Callable[[], Any]:
        about = (OPERATIONS.index(call.operation), DTYPE_CODES[call.dtype], ctypes.c_size_t(call.count), call.root)
        return partial(self._library.run_calls, *about, int(in_place))


def main() -> None:
    """Serve one of SOURCES."""
    name, capacity = sys.argv[1], int(sys.argv[2])
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if SOURCES[name].job:
        rank, size = load_mpi().COMM_WORLD.rank, load_mpi().COMM_WORLD.size
    folder = str(Path(os.environ[SOCKET] + "rank").parent)
    serve(lambda: Compiled(name, rank, size, folder, capacity), (CompileError, ValueError), rank)


if __name__ == "__main__":
    main()
