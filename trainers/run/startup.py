"""From a command line to what a run starts with: its settings, and a communicator that keeps to them."""

from __future__ import annotations

from collections.abc import Sequence

from commengine import CollectiveError, Communicator, UsageError
from trainers import config as settings
from trainers.config import TrainConfig
from trainers.data.corpus import with_vocabulary


def read_config(argv: Sequence[str] | None, command: str, ranks: int) -> TrainConfig:
    """The settings of a run on ``ranks`` ranks, valid, its vocabulary known. For rank 0: it reads files.

    Raises UsageError or ValueError, which names the option.
    """
    config = settings.parse(argv, command)
    settings.validate(config, ranks)
    config = with_vocabulary(config)
    config.model().require_parallel(config.tensor_model_parallel_size, ranks=ranks)
    return config


def watched(config: TrainConfig, world: Communicator) -> Communicator:
    """The ranks of ``world`` with the run's timeout, device and transport. Collective; the caller closes it.

    Raises UsageError, on every rank alike, where a rank cannot have its device.
    """
    timeout = 60 * config.distributed_timeout_minutes or None
    try:
        return Communicator(world.mpi, timeout=timeout, device=config.device, transport=config.device_transport)
    except CollectiveError as error:
        raise UsageError(f"--device {config.device or 'cuda (the default here)'}: {error}") from error
