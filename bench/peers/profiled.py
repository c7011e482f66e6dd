"""Profiles of PyTorch's own collectives, one file a rank, for bench.replay.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m bench.peers.profiled FOLDER

Rank 0 is shown; start as many ranks as WORLD_SIZE. The collectives are gloo's, and PyTorch's profiler writes
FOLDER/rank0.pt.trace.json.gz, FOLDER/rank1.pt.trace.json.gz, ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

ELEMENTS = 1000


def run(size: int) -> None:
    """The collectives that are profiled. Collective over all ranks."""
    one, all_of_them = torch.ones(ELEMENTS), torch.empty(size * ELEMENTS)
    dist.all_reduce(one)
    dist.all_gather(list(all_of_them.chunk(size)), one)
    dist.broadcast(one.bfloat16(), 0)
    dist.all_to_all_single(torch.empty_like(all_of_them), all_of_them)
    dist.reduce(one.double(), 0)
    last = size - 1
    dist.scatter(one, list(all_of_them.chunk(size)) if dist.get_rank() == last else None, last)
    dist.gather(one, list(all_of_them.chunk(size)) if dist.get_rank() == last else None, last)
    dist.barrier()


def main(folder: str) -> None:
    """Profile one rank."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        run(size)
    found.export_chrome_trace(str(Path(folder) / f"rank{rank}.pt.trace.json.gz"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
