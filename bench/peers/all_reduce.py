"""All-reduces of a device tensor through torch.distributed: the peer in ``python -m bench.gpu overhead``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from bench.contests.all_reduce_options import parser
from bench.contests.serving import serve


def main() -> None:
    """Set up, then do as the driver says."""
    given = parser("bench.peers.all_reduce", __doc__).parse_args()
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    tensor = torch.ones(max(1, given.bytes // 4), device=device)
    mean = dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM  # gloo has no average

    def step() -> float:
        for _ in range(given.calls):
            dist.all_reduce(tensor, mean)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 0.0

    step()
    serve(step, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
