"""A process group on the ranks of an MPI job."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

from bench.transports.environments import free_port


def start(mpi: Any) -> None:
    """Make torch.distributed's group of gloo of the ranks of ``mpi``, on one node. Collective."""
    warnings.simplefilter("ignore", FutureWarning)  # of names that are deprecated, which are tested all the same
    port = mpi.bcast(free_port())
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=mpi.rank, world_size=mpi.size)
