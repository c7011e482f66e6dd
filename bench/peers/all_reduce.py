"""All-reduces of a device tensor through torch.distributed: the peer in ``python -m bench.gpu overhead``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from bench.peers.group import process_group


@contextmanager
def contestant(task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """The step of the task of `bench.programs.all_reduce`."""
    device = torch.device(task["device"])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    with process_group("nccl" if device.type == "cuda" else "gloo"):
        tensor = torch.ones(max(1, task["bytes"] // 4), device=device)
        mean = dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM  # gloo has no average

        def step() -> float:
            for _ in range(task["calls"]):
                dist.all_reduce(tensor, mean)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return 0.0

        step()
        yield step, ""
