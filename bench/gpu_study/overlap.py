"""All-reduces of device tensors beside matrix products, on the products' CUDA stream and on a stream of their own.

Each round runs the same products and all-reduces in both ways, in random order. The second stream has a high priority.
With one rank NCCL has nothing to send. "Hidden" is the share of the all-reduces' time that no product waited for. The
timelines are written beside the table, for chrome://tracing.
"""

from __future__ import annotations

import random
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch

from bench.command.files import add_files
from bench.command.machine import environment, heading
from bench.contests.driver import Spread, ratio
from bench.gpu_study.rows import RowFile
from commengine import Communicator, trace
from commengine.stream import Stream, Work

SIDE = 8192


def add_options(parser: ArgumentParser) -> None:
    """The options of this study."""
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default: %(default)s)")
    parser.add_argument("--bucket-mb", type=int, default=40, help="MB of each all-reduce (default: %(default)s)")
    add_files(parser)


def products(count: int, left: torch.Tensor, right: torch.Tensor) -> None:
    """Enqueue ``count`` products."""
    for _ in range(count):
        left @ right


def ceiling(left: torch.Tensor, right: torch.Tensor, count: int = 50) -> float:
    """TFLOP/s of a bf16 product with nothing beside it."""
    products(5, left, right)
    torch.cuda.synchronize()
    start = time.perf_counter()
    products(count, left, right)
    torch.cuda.synchronize()
    return 2 * SIDE**3 * count / (time.perf_counter() - start) / 1e12


def step(
    world: Communicator, stream: Stream | None, left: torch.Tensor, right: torch.Tensor, buckets: list[torch.Tensor]
) -> float:
    """Seconds of products, each pair followed by the all-reduce of a bucket, as in a backward pass."""
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


def run(world: Communicator, given: Any) -> None:
    """Measure; rank 0 prints and writes. Both rows are written after every round, over the rounds so far."""
    result = environment("bench.gpu")
    left, right = (torch.randn(SIDE, SIDE, device=world.device, dtype=torch.bfloat16) for _ in range(2))
    buckets = [torch.ones(given.bucket_mb * 250_000, device=world.device) for _ in range(8)]
    streams: dict[str, Stream | None] = {"one stream": None, "two streams": world.new_stream()}
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    hidden: dict[str, float] = {}
    speed = ceiling(left, right)
    shuffle = random.Random(0)  # the same on every rank
    for number in range(given.rounds):
        for name in shuffle.sample(list(streams), 2):
            with trace(world) as log:
                seconds[name].append(step(world, streams[name], left, right, buckets))
            events = [event for event in log.events if event.operation == "all_reduce"]
            hidden[name] = sum(event.hidden_seconds for event in events) / sum(event.seconds for event in events)
            if given.output and world.rank == 0:
                log.save_chrome(Path(given.output).with_name(f"gpu_overlap_{name.replace(' ', '_')}.json"))
        if world.rank == 0:
            write(world.size, result, given, speed, seconds, hidden, quiet=number < given.rounds - 1)


def write(
    ranks: int, result: dict[str, Any], given: Any, speed: float, seconds: dict[str, list[float]],
    hidden: dict[str, float], *, quiet: bool,
) -> None:  # fmt: skip
    """Write the table of the rounds so far."""
    rows = RowFile(
        [
            *heading(f"Overlap on a device, {ranks} ranks", result),
            "", f"bf16 products of {SIDE}^3: {speed:.0f} TFLOP/s with nothing beside them",
        ],
        ["| | ms a step | over one stream | hidden |", "|---|--:|--:|--:|"],
        result | {"ranks": ranks}, output=given.output, json_file=given.json, quiet=quiet,
    )  # fmt: skip
    for name, times in seconds.items():
        cells = [Spread.of([each * 1e3 for each in times]).text(), ratio(times, seconds["one stream"]).text()]
        line = f"| {name} | {' | '.join(cells)} | {hidden[name]:.0%} |"
        rows.add(line, {"name": name, "seconds": times, "hidden": hidden[name]})
