"""The start of a run: its settings from a command line, and a communicator with those settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from commengine import CollectiveError, Communicator, UsageError
from trainers import options
from trainers.config import TrainConfig

Config = TypeVar("Config", bound=TrainConfig)


def read_config(kind: type[Config], argv: Sequence[str] | None, command: str, ranks: int) -> Config:
    """The valid and complete settings, of type ``kind``, of a run on ``ranks`` ranks. It reads files, on rank 0 only.

    argv: the arguments of ``command``; None for those of this process. Raises UsageError or ValueError, naming the
    option.
    """
    config = options.parse(kind, argv, command)
    config.validate(ranks)
    return config.completed(ranks)


def watched(config: TrainConfig, world: Communicator) -> Communicator:
    """A communicator of the ranks of ``world`` with the run's timeout, device and transport; the caller closes it.

    The device becomes torch's current device. Collective over ``world``. Raises UsageError, on every rank, where any
    rank cannot have its device.
    """
    timeout = 60 * config.distributed_timeout_minutes or None
    try:
        made = Communicator(world.mpi, timeout=timeout, device=config.device, transport=config.device_transport)
    except CollectiveError as error:
        raise UsageError(f"--device {config.device or 'cuda (the default here)'}: {error}") from error
    made.make_device_current()
    return made
