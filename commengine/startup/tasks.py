"""The tasks that a launcher started, held against the ranks that MPI sees."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from commengine.errors import LaunchError
from commengine.job_end import TASK_NUMBERS, say

#: the environment variables in which launchers tell their tasks the number of tasks. The first one that is set counts:
#: an mpiexec inside a Slurm allocation sets its own variable and inherits Slurm's
TASK_COUNTS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

#: those that only a launcher's own tasks have. A batch script has SLURM_NTASKS, too, and is no task
STEP_COUNTS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")

#: the variables in which launchers tell a task its number on its node
LOCAL_NUMBERS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")

#: seconds that the other tasks leave to the first one to speak; each waits a second longer than the one before it
SPEAK_SECONDS = 5.0


def check_world_size(size: int, environ: Mapping[str, str] = os.environ, library: str = "") -> None:
    """Raise `LaunchError` when the launcher started another number of tasks than MPI has ranks.

    size: the size of MPI.COMM_WORLD. library: MPI's own name and version. With the wrong launcher, N tasks become N
    worlds of size 1. Each of them would train, and all would overwrite one checkpoint.
    """
    tasks = number_of_tasks(environ)
    if tasks is not None and tasks[1] != size:
        raise LaunchError(_contradiction(*tasks, size, environ, library))


_said_alone = False


def say_if_alone(size: int, environ: Mapping[str, str] = os.environ, library: str = "") -> None:
    """Say once, on each task, that its world of one rank is one of several that a launcher started together.

    size, library: as in `check_world_size`. It is no error: a program may be meant to run several times.
    """
    global _said_alone
    tasks = number_of_tasks(environ, STEP_COUNTS)
    if _said_alone or size != 1 or tasks is None or tasks[1] == 1:
        return
    _said_alone = True
    meant = "Each task computes alone. If that is meant, make the Communicator over MPI.COMM_SELF."
    say(f"[task {task_number(environ)}] {_contradiction(*tasks, size, environ, library)} {meant}")


def _contradiction(variable: str, count: int, size: int, environ: Mapping[str, str], library: str) -> str:
    name = library.replace("Version:", "").split(",")[0].split("\n")[0]
    this = f"this Python's MPI is {' '.join(name.split())}" if name else "see which MPI this Python has"
    # Slurm's PMI 2 sets PMI_SIZE as the mpiexec of MPICH and of Intel does, which alone sets MPI_LOCALRANKID.
    by_srun = variable.startswith("SLURM") or (
        variable == "PMI_SIZE" and "SLURM_PROCID" in environ and "MPI_LOCALRANKID" not in environ
    )
    if by_srun:
        cause = (
            f"srun and this MPI do not speak the same PMI: {this}. MPICH and Intel's MPI need `srun --mpi=pmi2`, Open "
            "MPI `srun --mpi=pmix`; inside sbatch, start the program with srun or mpiexec"
        )
    else:
        beside = Path(sys.executable).parent / "mpiexec"
        cause = f"the mpiexec on PATH belongs to another MPI than mpi4py's: {this}; use its mpiexec"
        if sys.prefix != sys.base_prefix and beside.exists():  # a virtual environment's MPI is a wheel
            cause += f" ({beside})"
    return f"{variable}={count}, but MPI's world has {size} rank{'s' * (size > 1)}. Likely cause: {cause}."


def number_of_tasks(
    environ: Mapping[str, str] = os.environ, variables: tuple[str, ...] = TASK_COUNTS
) -> tuple[str, int] | None:
    """Return the launcher's variable and the number of its tasks, or None where no launcher started this process."""
    for variable in variables:
        if environ.get(variable, "").isdecimal():
            return variable, int(environ[variable])
    return None


def seconds_to_wait(environ: Mapping[str, str] = os.environ) -> float:
    """Return the seconds after which this task tells of an error that all tasks have.

    Each task is a world of its own, so nobody can agree who speaks. The first task speaks at once. Launchers end the
    other tasks when one has failed, so they wait before they speak: also for a first task that starts late.
    """
    number = task_number(environ)
    return SPEAK_SECONDS + min(number, 10) if number else 0.0


def task_number(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of this task in its job, by what the launcher says; 0 without a launcher."""
    return _first(TASK_NUMBERS, environ)


def first_on_node(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher calls this task the first one on its node; True if no launcher says."""
    return _first(LOCAL_NUMBERS, environ) == 0


def _first(names: tuple[str, ...], environ: Mapping[str, str]) -> int:
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), 0)
