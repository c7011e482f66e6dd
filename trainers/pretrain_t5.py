"""Train a T5: ``mpiexec -n 2 python -m trainers.pretrain_t5 --tensor-model-parallel-size 2 --data-path PREFIX``."""

from __future__ import annotations

import sys

from .run import signals

if __name__ == "__main__":  # before the other imports, which take seconds
    signals.end_on_signals(sys.argv[1:])

    from .settings.command import answer_help
    from .settings.commands import T5Settings

    answer_help(T5Settings, "pretrain_t5")

from commengine import Communicator, launch

from .run.startup import run_command
from .tasks.commands import PRETRAIN_T5
from .tasks.dry_run import dry_run
from .tasks.t5 import T5Task

COMMAND = PRETRAIN_T5


def main(world: Communicator) -> int:
    """One rank of the run, collective over ``world``: the exit status (`trainers.run.loop.train`)."""
    return run_command(world, COMMAND, T5Task.started, dry_run)


if __name__ == "__main__":
    launch.run(main, device="cpu")
