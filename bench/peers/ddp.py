"""Data-parallel peer: torch's DistributedDataParallel over gloo.

torchrun --nproc-per-node 2 -m bench.peers.ddp [--task FILE] [--bucket-mb 25]
"""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.contests.serving import serve
from bench.peers.plain import adamw, batch, build, make_clip, make_step, parser, read_task
from trainers.options import ABOVE_ZERO


def main() -> None:
    """Set up, then do as the driver says."""
    options = parser("bench.peers.ddp", __doc__)
    options.add_argument(
        "--bucket-mb", type=float, valid=ABOVE_ZERO, default=25.0, help="bucket_cap_mb (torch's default: 25)"
    )
    arguments = options.parse_args()
    task = read_task(arguments.task)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        build(task),
        bucket_cap_mb=arguments.bucket_mb,
        gradient_as_bucket_view=True,  # gradients live in the buckets: no copy in, none out
        static_graph=True,  # no search for unused parameters
    )
    optimizer = adamw(task, model.parameters())
    mine = batch(task, dist.get_rank(), dist.get_world_size())
    step = make_step(model, optimizer, mine, make_clip(task, model))
    serve(
        step,
        note=f"packed QKV, buckets of {arguments.bucket_mb:g} MiB, static_graph, gradient_as_bucket_view",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
