"""The process group of the peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def process_group(backend: str = "gloo") -> Iterator[None]:
    """torch.distributed's group of all ranks, by the variables that torchrun sets. Collective."""
    dist.init_process_group(backend)
    yield
    dist.destroy_process_group()


def replicated(model: nn.Module) -> tuple[DistributedDataParallel, str]:
    """The model with its gradients averaged over the ranks, and a note. Collective."""
    wrapped = DistributedDataParallel(
        model,
        bucket_cap_mb=25.0,  # torch's default
        gradient_as_bucket_view=True,  # gradients live in the buckets: no copy in, none out
        static_graph=True,  # no search for unused parameters
    )
    return wrapped, "gloo, buckets of 25 MiB, static_graph, gradient_as_bucket_view"
