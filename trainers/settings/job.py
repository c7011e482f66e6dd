"""What every command on ranks that share a model has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from commengine.options.declared import option
from commengine.options.ranges import NOT_NEGATIVE, AtLeastOne, ValidRange

Minutes = Annotated[float, NOT_NEGATIVE, ValidRange(lambda minutes: minutes <= 10**6, "must be at most 1000000")]
DEVICE = ValidRange(
    lambda device: re.fullmatch(r"cpu|cuda(:\d{1,4})?", device) is not None, "must be cpu, cuda, or cuda:N"
)


@dataclass(frozen=True)
class JobOptions:
    """The ranks, their devices, and how long they wait for each other."""

    tensor_model_parallel_size: AtLeastOne = option(
        1, "ranks that one model is split over; the other factor of the ranks is data-parallel"
    )
    device: Annotated[str, DEVICE] | None = option(
        None, "cpu or cuda; each rank of a node gets a device of its own (default: cuda if every rank can have one)"
    )
    device_transport: str = option(
        "nccl", "how device tensors travel: by NCCL, or through host memory (staged)", choices=("nccl", "staged")
    )
    distributed_timeout_minutes: Minutes = option(
        10.0, "a collective that takes longer ends the job, with a report of the ranks that are missing; 0: no limit"
    )
    verify_checkpoints: bool = option(
        True, "compare a checkpoint with its checksums before loading it; a damaged file is then an error"
    )
