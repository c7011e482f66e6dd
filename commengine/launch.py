"""Starting a program of MPI ranks, and ending all ranks when one of them fails.

Nothing happens on import. A command of this project is ``launch.run(main)``. Another MPI program, which starts and ends
MPI itself, uses `Communicator` alone, or `abort_on_error` besides. Where several programs share MPI.COMM_WORLD,
`split_world` gives each its ranks and connects them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from .communicator import Communicator
from .device.choice import DeviceLike
from .errors import LaunchError, UsageError, one_line
from .job_end import abort, is_child_of_rank, process_status, say, say_once_and_abort
from .startup.programs import WorldPart, split_world
from .startup.segments import unlink_own
from .startup.start import start_mpi
from .startup.tasks import check_world_size, seconds_to_wait

__all__ = ["WorldPart", "abort_on_error", "check_world_size", "run", "split_world"]

#: seconds that a rank with an error waits for the other ranks to end, before it ends them
LEAVE_SECONDS = 5.0


def run(main: Callable[[Communicator], int | None], *, device: DeviceLike = None) -> NoReturn:
    """Run ``main(world)`` as one rank of a job, then exit the process with the code that it returns (None is 0).

    main: gets a Communicator over MPI.COMM_WORLD, which is closed afterwards. device: as for `Communicator`; the device
    becomes torch's current device.

    An uncaught exception or ``sys.exit`` with an error on any rank ends all ranks at once, with the traceback of that
    rank and a non-zero exit code; Ctrl-C does so with one line and 130. Every rank must raise a `UsageError` together;
    only rank 0 prints it. If ``main`` returns EX_TEMPFAIL (75: start the job again), all ranks must return it. A child
    that a rank forks is no rank: it may end in any way, and the job goes on.
    """
    with abort_on_error():
        mpi = start_mpi()
        check_world_size(mpi.COMM_WORLD.size, library=mpi.Get_library_version())
        mpi.COMM_WORLD.Barrier()  # every rank has opened MPI's files in shared memory
        unlink_own()
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
        if is_child_of_rank():
            sys.exit(code)
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
    if code in (0, os.EX_TEMPFAIL):  # after an error its streams may hold collectives that not every rank has enqueued
        world.close()


@contextlib.contextmanager
def abort_on_error() -> Iterator[None]:
    """End every rank of MPI.COMM_WORLD when the block raises an exception on this rank.

    Prints the traceback once, labelled with the rank. The exit code is 1, that of a ``sys.exit``, or 130 after Ctrl-C.
    ``sys.exit(0)`` and ``sys.exit(None)`` pass through. Not collective.
    ``@abort_on_error()`` before a function does it for each call. A callback of ctypes or cffi needs that: its
    exception does not reach a block around the program that calls it. In a child that a rank forked it does nothing.
    """
    try:
        yield
    except BaseException as error:
        if not is_child_of_rank():
            _abort_after(error)
        raise


def _abort_after(error: BaseException) -> None:
    """Say the error and end all ranks. Returns after ``sys.exit`` without an error."""
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return
        if not isinstance(error.code, int):
            say(f"[rank {_world_rank()}] {error.code}")
        abort(error.code if isinstance(error.code, int) else 1)
    if isinstance(error, LaunchError):
        with contextlib.suppress(ValueError):  # not in the main thread
            # srun ends this task because another one has said the same. 75 would mean: start the job again.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        time.sleep(seconds_to_wait())
        say(f"error: {error}")
        abort(1)
    if isinstance(error, KeyboardInterrupt):
        say_once_and_abort(f"[rank {_world_rank()}] interrupted (SIGINT)", 130)
    say(f"[rank {_world_rank()}] {''.join(traceback.format_exception(error)).rstrip()}")
    abort(1)


def _world_rank() -> int | str:
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi.COMM_WORLD.rank if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else "?"
