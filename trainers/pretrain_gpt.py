"""Train a GPT: ``mpiexec -n 2 python -m trainers.pretrain_gpt --tensor-model-parallel-size 2 --data-path PREFIX``."""

from __future__ import annotations

from commengine import Communicator, launch
from commengine.rank_zero import on_rank_zero

from .run.loop import train
from .run.startup import read_config, watched
from .tasks.gpt import GPTTask, GPTTrainConfig

#: the settings of a run; each field is a flag
CONFIG = GPTTrainConfig


def main(world: Communicator) -> None:
    """One rank of the run. Rank 0 reads the flags and the files; an error in them is raised on every rank."""
    read = on_rank_zero(world, lambda: read_config(CONFIG, None, "pretrain_gpt", world.size).to_json())
    config = CONFIG(**read)
    with watched(config, world) as comm:
        train(config, comm, GPTTask)


if __name__ == "__main__":
    launch.run(main)
