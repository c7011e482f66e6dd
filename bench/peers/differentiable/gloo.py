"""A process group on the ranks of an MPI job."""

from __future__ import annotations

import socket
import warnings
from typing import Any

import torch.distributed as dist


def start(mpi: Any) -> None:
    """Make torch.distributed's group of gloo of the ranks of ``mpi``, on one node. Collective."""
    warnings.simplefilter("ignore", FutureWarning)  # of names that are deprecated, which are tested all the same
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = mpi.bcast(probe.getsockname()[1])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=mpi.rank, world_size=mpi.size)
