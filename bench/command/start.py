"""Start a command, on every rank of a job or in one process, and report errors of the user in one line.

Importing this imports no torch, so that a command can answer ``--help`` before the imports that take seconds.
"""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from commengine.errors import UsageError, one_line
from commengine.job_end import handle_signal, leave_broken_pipe
from commengine.startup.tasks import task_number

if TYPE_CHECKING:
    from tqdm import tqdm

    from commengine import Communicator
    from commengine.device.choice import DeviceLike

STATUS = 2  # of a process whose user made an error
HELP = ("-h", "--help")


def run_on_ranks(
    command: str,
    main: Callable[[Communicator], int | None],
    parser: Callable[[], ArgumentParser],
    *,
    device: DeviceLike = "cpu",
) -> NoReturn:
    """Run ``main(world)`` as one rank of a job, and exit the process with its status. See `commengine.launch.run`.

    command: its module. parser: makes its parser; ``--help`` is answered before MPI starts, by the first process. A
    `UsageError`, which every rank raises together, is printed by rank 0 and ends every rank with status 2.
    """
    answer_help(command, parser)
    from commengine import launch

    def reported(world: Communicator) -> int | None:
        try:
            status = main(world)
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            if world.size > 1:  # the launcher reads what ranks print; other ranks may wait for this one
                raise
            leave_broken_pipe()
            return 1
        except UsageError as error:
            if world.rank == 0:
                print_error(command, error)
            return STATUS

    launch.run(reported, device=device)


def run_alone(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main()`` of a command outside MPI, and exit the process with its status.

    A command that is terminated (SIGTERM) unwinds, so that the jobs that it started end with it.

    The status is 1, without a traceback, if the reader of standard output went away (``| head``), as the documentation
    of Python's signal module advises.
    """
    handle_signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        leave_broken_pipe()
        status = 1
    sys.exit(status)


def answer_help(command: str, parser: Callable[[], ArgumentParser]) -> None:
    """If the command line asks for help, let the first process print it, and exit every process."""
    if any(word in HELP for word in sys.argv[1:]):
        if is_first_process():
            with user_errors(command):
                parser().parse_args()
        sys.exit(0)


@contextmanager
def user_errors(command: str) -> Iterator[None]:
    """Outside MPI: turn UsageError, ValueError and OSError into one line, and exit with status 2.

    Where a launcher started several processes, the first one alone prints the line.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # see `run_alone`
    except (UsageError, ValueError, OSError) as error:
        if is_first_process():
            print_error(command, error)
        sys.exit(STATUS)


def print_error(command: str, problem: Exception | str) -> None:
    """One line on standard error."""
    print(f"python -m {command}: error: {one_line(problem)}", file=sys.stderr, flush=True)


def is_first_process() -> bool:
    """Whether this process is rank 0 of its job, by what the launcher says; True without a launcher."""
    return task_number() == 0


def progress(world: Communicator, total: int, description: str | None = None, *, piped: bool = False) -> tqdm[NoReturn]:
    """A progress bar on rank 0's standard error, if that is a terminal; nothing on the other ranks.

    piped: also where it is a launcher's pipe, in which it is drawn less often, and in 80 columns.
    """
    from tqdm import tqdm  # here: commands without a bar need none

    disable = True if world.rank else False if piped else None  # tqdm: None disables it where there is no terminal
    more: dict[str, Any] = {"mininterval": 0.1 if sys.stderr.isatty() else 2.0, "ncols": 80} if piped else {}
    return tqdm(total=total, disable=disable, file=sys.stderr, desc=description, leave=False, **more)
