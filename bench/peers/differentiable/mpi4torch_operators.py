"""The collectives of mpi4torch (Knechtges et al.), which is not installed with this project."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.conformance import serial
from bench.conformance.operator import Operator


def operators(mpi: Any) -> list[Operator]:
    """Those of its communicator that return one tensor. Collective."""
    import mpi4torch

    comm, ranks, rank = mpi4torch.comm_from_mpi4py(mpi), mpi.size, mpi.rank

    def first(y: Tensor) -> Tensor:
        return y if rank == 0 else y[:0].reshape(0)  # what other ranks have is not defined

    def rows(x: Tensor) -> int:
        return len(serial.parts(x, ranks)[rank])

    def reduced(x: Tensor) -> Tensor:
        return first(comm.Reduce_(torch.clone(x), mpi4torch.MPI_SUM, 0))

    return [
        Operator("Allreduce", lambda x: comm.Allreduce(x, mpi4torch.MPI_SUM), serial.all_reduce),
        Operator(
            "Allreduce, MPI_MAX", lambda x: comm.Allreduce(x, mpi4torch.MPI_MAX), serial.all_reduce_max, linear=False
        ),
        Operator("Bcast_", lambda x: comm.Bcast_(torch.clone(x), 0), serial.broadcast),
        Operator("Reduce_", reduced, serial.reduce),
        Operator("Gather", lambda x: first(comm.Gather(x, 0, 0)), serial.gather, rows="own"),
        Operator("Allgather", lambda x: comm.Allgather(x, 0), serial.all_gather, rows="own"),
        Operator("Scatter", lambda x: comm.Scatter(x, 0, rows(x), 0), serial.scatter, rows="parts"),
    ]
