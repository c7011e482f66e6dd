"""Train a BERT: ``mpiexec -n 2 python -m trainers.pretrain_bert --data-path PREFIX_text_sentence``."""

from __future__ import annotations

from commengine import Communicator, launch

from .run.startup import run_command
from .tasks.bert import BERTTask, BERTTrainConfig

#: the settings of a run; each field is a flag
CONFIG = BERTTrainConfig


def main(world: Communicator) -> None:
    """One rank of the run, collective over ``world``."""
    run_command(world, "pretrain_bert", CONFIG, BERTTask)


if __name__ == "__main__":
    launch.run(main)
