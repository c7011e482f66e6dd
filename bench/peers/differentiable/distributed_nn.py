"""The operators of torch.distributed.nn.functional, on gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as untyped
from torch import Tensor

from bench.conformance import serial
from bench.conformance.operator import Operator
from bench.peers.differentiable import gloo

nn: Any = untyped


def operators(mpi: Any) -> list[Operator]:
    """All but ``_all_gather_base``, which says that it has no backward on gloo. Collective."""
    gloo.start(mpi)
    ranks, rank = mpi.size, mpi.rank

    def first(y: Tensor) -> Tensor:
        return y if rank == 0 else y[:0].reshape(0)  # what other ranks have is not defined

    def all_to_all_single(x: Tensor) -> Any:
        sent = [len(part) for part in serial.parts(x, ranks)]
        come = mpi.alltoall(sent)
        return nn.all_to_all_single(x.new_empty((sum(come), *x.shape[1:])), x, come, sent)

    def all_to_all(x: Tensor) -> Tensor:
        parts = serial.parts(x, ranks)
        come = [x.new_empty((rows, *x.shape[1:])) for rows in mpi.alltoall([len(part) for part in parts])]
        return torch.cat(nn.all_to_all(come, list(parts)))

    def reduce_scatter(x: Tensor) -> Any:
        parts = serial.parts(x, ranks)
        return nn.reduce_scatter(torch.empty_like(parts[rank]), list(parts))

    return [
        Operator("broadcast", lambda x: nn.broadcast(x, 0), serial.broadcast),
        Operator("reduce", lambda x: first(nn.reduce(x, 0)), serial.reduce),
        Operator("all_reduce", nn.all_reduce, serial.all_reduce),
        Operator("all_reduce, AVG", lambda x: nn.all_reduce(x, dist.ReduceOp.AVG), serial.all_reduce_mean),
        Operator(
            "all_reduce, MAX", lambda x: nn.all_reduce(x, dist.ReduceOp.MAX), serial.all_reduce_max, linear=False
        ),
        Operator(
            "all_reduce, PRODUCT", lambda x: nn.all_reduce(x, dist.ReduceOp.PRODUCT), serial.all_reduce_product,
            linear=False,
        ),
        Operator("all_gather", lambda x: torch.cat(nn.all_gather(x)), serial.all_gather, rows="own"),
        Operator("gather", lambda x: first(torch.cat(nn.gather(x))), serial.gather),
        Operator(
            "scatter", lambda x: nn.scatter(list(serial.parts(x, ranks))), serial.scatter, rows="multiple"
        ),
        Operator("reduce_scatter", reduce_scatter, serial.reduce_scatter, rows="multiple"),
        Operator("all_to_all", all_to_all, serial.all_to_all, rows="multiple"),
        Operator("all_to_all, uneven", all_to_all, serial.all_to_all, rows="own"),
        Operator("all_to_all_single", all_to_all_single, serial.all_to_all, rows="own"),
    ]  # fmt: skip
