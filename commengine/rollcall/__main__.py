"""``python -m commengine.rollcall [OPTIONS] script.py ARGUMENTS...``: run an MPI program and say who waits where."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from commengine.startup.tasks import number_of_tasks, task_number

#: variables by which the steps of a job differ
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "I_MPI_HYDRA_UUID", "PBS_JOBID", "LSB_JOBID")


def parser() -> argparse.ArgumentParser:
    """The options, which end where the program begins."""
    found = argparse.ArgumentParser(prog="python -m commengine.rollcall", description=__doc__, allow_abbrev=False)
    found.add_argument(
        "--every", type=float, default=60.0, metavar="SECONDS",
        help="report when half of the ranks have not moved for so long (default: 60)",
    )  # fmt: skip
    found.add_argument(
        "--limit", type=float, metavar="SECONDS",
        help="the job's time limit: report shortly before it (default: Slurm's, where it is set)",
    )  # fmt: skip
    found.add_argument(
        "--folder", type=Path, metavar="PATH",
        help="a folder that all hosts share, and no other job uses (default: .rollcall-... in the current folder); "
        "MPICH's mpirun needs it for several programs in one job",
    )  # fmt: skip
    found.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
    found.add_argument("program", nargs=argparse.REMAINDER, help="script.py and its arguments")
    return found


def main() -> None:
    """Become the program, with a watcher beside it: this process has imported torch, which the program may not need."""
    options = parser()
    words = options.parse_args()
    if words.every < 0.5:
        options.error(f"--every {words.every:g}: must be at least 0.5 seconds")
    if words.module is None and (not words.program or not Path(words.program[0]).is_file()):
        options.error(f"{words.program[0] if words.program else 'the program is missing'}: must be a Python file")
    rest = words.program if words.module is None else [words.module, *words.program]
    tasks = number_of_tasks()
    job = [os.environ[name] for name in _JOB if name in os.environ] or rest  # a job may have several programs
    key = hashlib.sha256("\0".join(job).encode()).hexdigest()[:8]
    settings = {
        "rank": task_number(),
        "size": tasks[1] if tasks else 1,
        "every": words.every,
        "limit": words.limit,
        "folder": str((words.folder or Path(f".rollcall-{key}")).resolve()),
        "module": words.module is not None,
    }
    program = str(Path(__file__).with_name("program.py"))
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *flags, program, json.dumps(settings), *rest])


if __name__ == "__main__":
    main()
