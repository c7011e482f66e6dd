"""The operators of torch.distributed._functional_collectives, on gloo."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as untyped
from torch import Tensor

from bench.conformance import serial
from bench.conformance.operator import Operator
from bench.peers.differentiable import gloo

functional: Any = untyped


def operators(mpi: Any) -> list[Operator]:
    """Those that torch differentiates. Collective."""
    gloo.start(mpi)
    ranks, world = mpi.size, dist.group.WORLD

    def waited(y: Tensor) -> Tensor:
        out: Tensor = functional.wait_tensor(y)
        return out

    def all_to_all_single(x: Tensor) -> Tensor:
        sent = [len(part) for part in serial.parts(x, ranks)]
        return waited(functional.all_to_all_single_autograd(x, mpi.alltoall(sent), sent, world))

    def reduced(op: str) -> Any:
        return lambda x: waited(functional.all_reduce(x, op, world))

    return [
        Operator("broadcast", lambda x: waited(functional.broadcast(x, 0, world)), serial.broadcast),
        Operator("all_reduce", reduced("sum"), serial.all_reduce),
        Operator("all_reduce, avg", reduced("avg"), serial.all_reduce_mean),
        Operator("all_reduce, max", reduced("max"), serial.all_reduce_max, linear=False),
        Operator(
            "all_gather_tensor_autograd", lambda x: waited(functional.all_gather_tensor_autograd(x, 0, world)),
            serial.all_gather, rows="own",
        ),
        Operator(
            "reduce_scatter_tensor_autograd",
            lambda x: waited(functional.reduce_scatter_tensor_autograd(x, "sum", 0, world)), serial.reduce_scatter,
            rows="multiple",
        ),
        Operator("all_to_all_single_autograd", all_to_all_single, serial.all_to_all, rows="own"),
    ]  # fmt: skip
