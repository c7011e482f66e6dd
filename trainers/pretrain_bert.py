"""Train a BERT: ``mpiexec -n 2 python -m trainers.pretrain_bert --data-path PREFIX_text_sentence``."""

from __future__ import annotations

import sys

from .run import signals

if __name__ == "__main__":  # before the other imports, which take seconds
    signals.end_on_signals(sys.argv[1:])

from commengine import Communicator, launch

from .run.startup import run_command
from .tasks.bert import BERTTask, BERTTrainConfig
from .tasks.dry_run import dry_run

#: the settings of a run; each field is a flag
CONFIG = BERTTrainConfig


def main(world: Communicator) -> int:
    """One rank of the run, collective over ``world``: the exit status (`trainers.run.loop.train`)."""
    return run_command(world, "pretrain_bert", CONFIG, BERTTask, dry_run)


if __name__ == "__main__":
    launch.run(main, device="cpu")
