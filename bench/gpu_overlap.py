"""Reductions of device tensors beside matrix products, on a stream of their own and not; and the products' ceiling.

    mpiexec -n 2 python -m bench.gpu_overlap --output bench/results/gpu_overlap.md

Each round runs the same products and all-reduces twice, in random order: all on one CUDA stream, and the all-reduces on
a high-priority one. With one rank NCCL has nothing to send. "Hidden" is the share of the all-reduces' time that no
product waited for. The timelines are beside the table, for chrome://tracing.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch

from bench.command.machine import environment, heading
from bench.contests.driver import Spread, ratio
from commengine import Communicator, launch, trace
from commengine.stream import Stream, Work

SIDE = 8192


def products(count: int, left: torch.Tensor, right: torch.Tensor) -> None:
    """Enqueue ``count`` products."""
    for _ in range(count):
        left @ right


def ceiling(left: torch.Tensor, right: torch.Tensor, count: int = 50) -> float:
    """TFLOP/s of a bf16 product: what a model's are to be compared with."""
    products(5, left, right)
    torch.cuda.synchronize()
    start = time.perf_counter()
    products(count, left, right)
    torch.cuda.synchronize()
    return 2 * SIDE**3 * count / (time.perf_counter() - start) / 1e12


def step(
    world: Communicator, stream: Stream | None, left: torch.Tensor, right: torch.Tensor, buckets: list[torch.Tensor]
) -> float:
    """Products, each followed by the all-reduce of a bucket, as in a backward pass; seconds."""
    world.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    works: list[Work] = []
    for bucket in buckets:
        products(2, left, right)
        works.append(world.all_reduce(bucket, "avg", stream=stream))
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main(world: Communicator) -> None:
    """Measure; rank 0 prints and writes."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--bucket-mb", type=int, default=40)
    options.add_argument("--output", type=Path, help="write the table as markdown")
    arguments = options.parse_args()
    result = environment("bench.gpu_overlap")
    left, right = (torch.randn(SIDE, SIDE, device=world.device, dtype=torch.bfloat16) for _ in range(2))
    buckets = [torch.ones(arguments.bucket_mb * 250_000, device=world.device) for _ in range(8)]
    lanes: dict[str, Stream | None] = {"one stream": None, "two streams": world.new_stream()}
    seconds: dict[str, list[float]] = {name: [] for name in lanes}
    hidden: dict[str, float] = {}
    speed = ceiling(left, right)
    shuffle = random.Random(0)  # the same on every rank
    for _ in range(arguments.rounds):
        for name in shuffle.sample(list(lanes), 2):
            with trace(world) as log:
                seconds[name].append(step(world, lanes[name], left, right, buckets))
            events = [event for event in log.events if event.operation == "all_reduce"]
            hidden[name] = sum(event.hidden_seconds for event in events) / sum(event.seconds for event in events)
            if arguments.output and world.rank == 0:
                log.save_chrome(arguments.output.with_name(f"gpu_overlap_{name.replace(' ', '_')}.json"))
    if world.rank != 0:
        return
    lines = heading(f"Overlap on a device, {world.size} ranks", result)
    lines += ["", f"bf16 products of {SIDE}^3: {speed:.0f} TFLOP/s with nothing beside them", ""]
    lines += ["| | ms a step | over one stream | hidden |", "|---|--:|--:|--:|"]
    for name, times in seconds.items():
        cells = [Spread.of([each * 1e3 for each in times]).text(), ratio(times, seconds["one stream"]).text()]
        lines.append(f"| {name} | {' | '.join(cells)} | {hidden[name]:.0%} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    launch.run(main, device="cuda")
