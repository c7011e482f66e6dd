"""Data-parallel peer of ``bench.contest data_parallel``: torch's DistributedDataParallel over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from bench.peers.group import process_group, replicated
from bench.programs.image_task import ImageTask, build, make_step


@contextmanager
def contestant(task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """The step of an `ImageTask`."""
    given = ImageTask(**task)
    with process_group():
        model, note = replicated(build(given))
        yield make_step(given, model, dist.get_rank(), dist.get_world_size()), note
