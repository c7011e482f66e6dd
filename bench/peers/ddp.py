"""Data-parallel peer of ``bench.contest step``: torch's DistributedDataParallel over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from bench.peers.group import process_group, replicated
from bench.peers.plain import adamw, batch, build, make_clip, make_step
from bench.programs.step_task import StepTask


@contextmanager
def contestant(task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """The step of a `StepTask`."""
    given = StepTask(**task)
    with process_group():
        model, note = replicated(build(given))
        mine = batch(given, dist.get_rank(), dist.get_world_size())
        clip = make_clip(given, model)
        yield make_step(model, adamw(given, model.parameters()), mine, clip), f"packed QKV, {note}"
