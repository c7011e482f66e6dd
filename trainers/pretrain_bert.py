"""Train a BERT: ``mpiexec -n 2 python -m trainers.pretrain_bert --tensor-model-parallel-size 2 --data-path PREFIX``."""

from __future__ import annotations

import sys

from .run import signals

if __name__ == "__main__":  # before the other imports, which take seconds
    signals.end_on_signals(sys.argv[1:])

    from .settings.command import answer_help
    from .settings.commands import BERTSettings

    answer_help(BERTSettings, "pretrain_bert")

from commengine import Communicator, launch

from .distillation.objective import distilled_bert
from .run.startup import run_command
from .tasks.commands import PRETRAIN_BERT
from .tasks.dry_run import dry_run

COMMAND = PRETRAIN_BERT


def main(world: Communicator) -> int:
    """One rank of the run, collective over ``world``: the exit status (`trainers.run.loop.train`)."""
    return run_command(world, COMMAND, distilled_bert, dry_run)


if __name__ == "__main__":
    launch.run(main, device="cpu")
