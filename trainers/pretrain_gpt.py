"""Train a GPT: ``mpiexec -n 2 python -m trainers.pretrain_gpt --tensor-model-parallel-size 2 --data-path PREFIX``."""

from __future__ import annotations

from typing import Any

from commengine import CollectiveError, Communicator, UsageError, launch

from . import config as settings
from .corpus import with_vocabulary
from .loop import train
from .rank_zero import on_rank_zero


def main(world: Communicator) -> None:
    """One rank of the run. Rank 0 reads the flags and files; what is wrong with them is one error for all."""

    def read() -> dict[str, Any]:
        config = settings.parse(None, "pretrain_gpt")
        settings.validate(config, world.size)
        config = with_vocabulary(config)
        config.model().require_parallel(config.tensor_model_parallel_size, ranks=world.size)
        return config.to_json()

    config = settings.TrainConfig(**on_rank_zero(world, read))
    timeout = 60 * config.distributed_timeout_minutes or None
    try:
        watched = Communicator(world.mpi, timeout=timeout, device=config.device, transport=config.device_transport)
    except CollectiveError as error:  # raised by all ranks or by none
        raise UsageError(f"--device {config.device or 'cuda (the default here)'}: {error}") from error
    with watched:
        train(config, watched)


if __name__ == "__main__":
    launch.run(main)
