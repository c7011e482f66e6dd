"""Data-parallel peer of bench.data_parallel: torch's DistributedDataParallel over gloo.

torchrun --nproc-per-node 2 -m bench.peers.residual_ddp --task FILE [--bucket-mb 25]
"""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.command.parser import new_program_parser
from bench.contests.residual_net import ImageTask, build, make_step
from bench.contests.serving import serve
from trainers.options import ABOVE_ZERO


def main() -> None:
    """Set up, then do as the driver says."""
    options = new_program_parser("bench.peers.residual_ddp", __doc__)
    options.add_argument("--task", required=True, metavar="FILE", help="JSON file of an ImageTask")
    options.add_argument(
        "--bucket-mb", type=float, valid=ABOVE_ZERO, default=25.0, help="bucket_cap_mb (torch's default: 25)"
    )
    arguments = options.parse_args()
    task = ImageTask.load(arguments.task)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        build(task),
        bucket_cap_mb=arguments.bucket_mb,
        gradient_as_bucket_view=True,  # gradients live in the buckets: no copy in, none out
        static_graph=True,  # no search for unused parameters
    )
    step = make_step(task, model, dist.get_rank(), dist.get_world_size())
    serve(step, note=f"gloo, buckets of {arguments.bucket_mb:g} MiB, static_graph, gradient_as_bucket_view")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
