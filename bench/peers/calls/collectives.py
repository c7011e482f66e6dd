"""torch.distributed's collectives, in one process beside each rank of bench.collectives.

bench/peers/calls/obeying.py has the commands that the process obeys.
"""

from __future__ import annotations

import datetime as dt
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench.peers.calls.obeying import serve
from bench.timing.starting import AgreedStart, Clock
from bench.transports.in_process import LocalTransport
from bench.transports.operations import CollectiveCall

OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
    "none": None,
}


class DistExchange:
    """See bench.timing.starting.Numbers."""

    def __init__(self, device: torch.device) -> None:
        self._number = torch.zeros(1, dtype=torch.float64, device=device)

    def largest(self, mine: float) -> float:
        self._number.fill_(mine)
        dist.all_reduce(self._number, dist.ReduceOp.MAX)
        return self._number.item()

    def from_first(self, mine: float) -> float:
        self._number.fill_(mine)
        dist.broadcast(self._number, 0)
        return self._number.item()


class Distributed(LocalTransport):
    """torch.distributed's collectives. backend: "gloo", or "nccl", which has not run yet."""

    name = "torch.distributed"

    def __init__(self, backend: str, capacity: int) -> None:
        device = torch.device("cpu")
        if backend == "nccl":
            device = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=dt.timedelta(seconds=120))
        memory = (torch.zeros(capacity, dtype=torch.uint8, device=device) for _ in range(2))
        super().__init__(dist.get_rank(), dist.barrier, *memory)
        self._on_device = device.type == "cuda"
        self._exchange = DistExchange(device)

    def agree(self, clock: dict[str, float]) -> None:
        """Let the calls that are bound from now on begin at agreed times."""
        if not isinstance(self.meet, AgreedStart) or self.meet.clock != Clock(**clock):
            self.meet = AgreedStart(Clock(**clock), self._exchange)

    def _start(self, call: CollectiveCall, in_place: bool) -> Callable[[], Any]:
        send, recv = self._buffers.views(call, self._rank, in_place)
        root, op, here = call.root, OPS[call.redop], self._rank == call.root
        calls: dict[str, tuple[Any, ...]] = {
            "all_reduce": (dist.all_reduce, recv, op),
            "reduce_scatter": (dist.reduce_scatter_tensor, recv, send, op),
            "all_gather": (dist.all_gather_into_tensor, recv, send),
            "broadcast": (dist.broadcast, recv, root),
            "reduce": (dist.reduce, recv, root, op),
            "gather": (dist.gather, send, list(recv.chunk(call.ranks)) if here else None, root),
            "scatter": (dist.scatter, recv, list(send.chunk(call.ranks)) if here else None, root),
            "all_to_all": (dist.all_to_all_single, recv, send),
            "sendrecv": (_exchange, send, (self._rank + 1) % call.ranks, recv, (self._rank - 1) % call.ranks),
            "barrier": (dist.barrier,),
            "send": (dist.send, send, call.partner(self._rank)),
            "recv": (dist.recv, recv, call.partner(self._rank)),
        }
        if call.operation == "all_to_all_v":
            return partial(_counted, recv, send, call.to(self._rank))
        if call.operation == "all_gather_v":
            calls[call.operation] = (dist.all_gather, list(torch.split(recv, call.fro(self._rank))), send)
        method, *arguments = calls[call.called(self._rank)]
        return partial(method, *arguments)

    def _finished(self, start: Callable[[], Any]) -> Callable[[], object]:
        def run() -> None:
            start()
            torch.cuda.synchronize()

        return run if self._on_device else start


def _exchange(send: torch.Tensor, to: int, recv: torch.Tensor, source: int) -> None:
    if source == dist.get_rank():
        raise ValueError("a process cannot send to itself")
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, recv, source), dist.P2POp(dist.isend, send, to)]):
        work.wait()


def _counted(recv: torch.Tensor, send: torch.Tensor, rows: list[int]) -> None:
    """As the engine's: the counts first."""
    sent = torch.tensor(rows, device=send.device)
    counts = torch.empty_like(sent)
    dist.all_to_all_single(counts, sent)
    dist.all_to_all_single(recv, send, counts.tolist(), rows)


def main() -> None:
    """Serve the collectives. Arguments: the backend, and the bytes of the largest call."""
    backend, capacity = sys.argv[1], int(sys.argv[2])
    # torch's errors: it cannot do it, or a rank is gone
    serve(lambda: Distributed(backend, capacity), (RuntimeError, ValueError, NotImplementedError))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
