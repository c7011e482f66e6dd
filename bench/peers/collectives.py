"""torch.distributed's collectives, in one process beside each rank of bench.collectives.

The other end is bench/transports/peer_process.py. The process obeys lines of JSON on standard input (bind, reset, run,
wrong), answers on standard output, and ends with its input. If torch.distributed has an operation in place only, its
time out of place includes the copy of the input, as it does for the engine (bench/transports/in_process.py).
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench.timing.starting import AgreedStart, Clock
from bench.transports.operations import DTYPES, Buffers, CollectiveCall

OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
    "none": None,
}


def invocation(call: CollectiveCall, send: torch.Tensor, recv: torch.Tensor, in_place: bool) -> Callable[[], object]:
    """The call from beginning to end, as the host sees it. A device must still be waited for."""
    rank, size, root, name, op = dist.get_rank(), call.ranks, call.root, call.operation, OPS[call.redop]
    here = rank == root
    if name == "barrier":
        return dist.barrier
    if name in ("all_reduce", "reduce", "broadcast"):
        operate = {
            "all_reduce": partial(dist.all_reduce, recv, op),
            "reduce": partial(dist.reduce, recv, root, op),
            "broadcast": partial(dist.broadcast, recv, root),
        }[name]
        if in_place or not call.sent(rank):
            return operate

        def copied() -> None:
            recv.copy_(send)
            operate()

        return copied
    if name == "reduce_scatter":
        return partial(dist.reduce_scatter_tensor, recv, send, op)
    if name == "gather":
        return partial(dist.gather, send, list(recv.chunk(size)) if here else None, root)
    if name == "scatter":
        return partial(dist.scatter, recv, list(send.chunk(size)) if here else None, root)
    if name == "sendrecv":
        if size == 1:
            raise ValueError("a process cannot send to itself")

        def exchange() -> None:
            following, previous = (rank + 1) % size, (rank - 1) % size
            transfers = [dist.P2POp(dist.irecv, recv, previous), dist.P2POp(dist.isend, send, following)]
            for work in dist.batch_isend_irecv(transfers):
                work.wait()

        return exchange
    if name == "all_gather":
        return partial(dist.all_gather_into_tensor, recv, send)
    if name == "all_to_all":
        return partial(dist.all_to_all_single, recv, send)
    raise ValueError(f"torch.distributed's program does not run {name}")


class DistExchange:
    """See bench.timing.starting.Exchange."""

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


class PeerServer:
    """The buffers, and one call that is bound, out of place and in place."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._on_device = device.type == "cuda"
        self._exchange = DistExchange(device)
        self._start: AgreedStart | None = None
        memory = [torch.zeros(capacity, dtype=torch.uint8, device=device) for _ in range(2)]
        self._buffers = Buffers(*memory)
        self._invoke: dict[bool, Callable[[], object]] = {}

    def bind(self, in_place: bool, dtype: str, **about: Any) -> dict[str, Any]:
        """Make a call ready by making it once, so that an operation that the backend does not have fails now."""
        self._call = CollectiveCall(dtype=DTYPES[dtype], **about)
        self.reset(in_place)
        views = self._buffers.views(self._call, dist.get_rank(), in_place)
        self._invoke[in_place] = invocation(self._call, *views, in_place)
        self.run(in_place, 1)
        return self.reset(in_place)

    def reset(self, in_place: bool) -> dict[str, Any]:
        self._buffers.reset(self._call, dist.get_rank(), in_place)
        return {}

    def run(self, in_place: bool, count: int, clock: dict[str, float] | None = None) -> dict[str, Any]:
        """Make ``count`` calls.

        They begin at a barrier, or at agreed times of ``clock`` (bench.timing.starting.Clock).
        """
        if clock is not None and (self._start is None or self._start.clock != Clock(**clock)):
            self._start = AgreedStart(Clock(**clock), self._exchange)
        meet: Any = dist.barrier if clock is None else self._start
        invoke, starts, seconds = self._invoke[in_place], [], []
        for _ in range(count):
            self._finish()
            meet()
            starts.append(time.perf_counter())
            invoke()
            self._finish()
            seconds.append(time.perf_counter() - starts[-1])
        return {"starts": starts, "seconds": seconds}

    def wrong(self) -> dict[str, Any]:
        return {"wrong": self._buffers.wrong(self._call, dist.get_rank())}

    def _finish(self) -> None:
        if self._on_device:
            torch.cuda.synchronize()


def main() -> None:
    """Run the server.

    Arguments: the backend ("gloo", or "nccl", which has not run yet), and the bytes of the largest call.
    """
    backend, capacity = sys.argv[1], int(sys.argv[2])
    answers, sys.stdout = sys.stdout, sys.stderr  # other output must not mix with the answers
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=dt.timedelta(seconds=120))

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    peer = PeerServer(device, capacity)
    say({})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            say(getattr(peer, command.pop("do"))(**command))
        except (
            RuntimeError,
            ValueError,
            NotImplementedError,
        ) as error:  # torch's errors: it cannot do it, or a rank is gone
            say({"error": str(error).strip().split("\n")[0]})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
