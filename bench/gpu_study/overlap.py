"""All-reduces of device tensors beside matrix products, on the products' CUDA stream and on a stream of their own.

Each round runs the same products and all-reduces in both ways, in random order. The second stream has a high priority.
With one rank NCCL has nothing to send. "Hidden" is the share of the all-reduces' time that no product waited for, as a
median over the rounds with its range. The timelines of the last round are written beside the table, for
chrome://tracing.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch

from bench.command.files import add_files
from bench.command.machine import environment, heading
from bench.contests.driver import Spread, ratio
from bench.gpu_study.rows import RowFile
from commengine import Communicator, trace
from commengine.stream import Stream, Work
from trainers.options import COUNT, OneLineParser, between

SIDE, TINY_SIDE = 8192, 128


def add_options(parser: OneLineParser) -> None:
    """The options of this study."""
    parser.add_argument("--rounds", type=int, valid=COUNT, default=15, help="rounds (default: %(default)s)")
    parser.add_argument(
        "--bucket-mb",
        type=int,
        valid=between(1, 2**16),
        default=40,
        help="MB of each all-reduce (default: %(default)s)",
    )
    parser.add_argument("--tiny", action="store_true", help="small products on the host, to try it without a GPU")
    add_files(parser)


def products(count: int, left: torch.Tensor, right: torch.Tensor) -> None:
    """Enqueue ``count`` products."""
    for _ in range(count):
        left @ right


def finish(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ceiling(left: torch.Tensor, right: torch.Tensor, count: int = 50) -> float:
    """TFLOP/s of a bf16 product with nothing beside it."""
    products(5, left, right)
    finish(left.device)
    start = time.perf_counter()
    products(count, left, right)
    finish(left.device)
    return 2 * len(left) ** 3 * count / (time.perf_counter() - start) / 1e12


def step(
    world: Communicator, stream: Stream | None, left: torch.Tensor, right: torch.Tensor, buckets: list[torch.Tensor]
) -> float:
    """Seconds of products, each pair followed by the all-reduce of a bucket, as in a backward pass."""
    world.barrier()
    finish(world.device)
    start = time.perf_counter()
    works: list[Work] = []
    for bucket in buckets:
        products(2, left, right)
        works.append(world.all_reduce(bucket, "avg", stream=stream))
    for work in works:
        work.wait()
    finish(world.device)
    return time.perf_counter() - start


def run(world: Communicator, given: Any) -> None:
    """Measure; rank 0 prints and writes. Both rows are written after every round, over the rounds so far."""
    result = environment("bench.gpu")
    side = TINY_SIDE if given.tiny else SIDE
    left, right = (torch.randn(side, side, device=world.device, dtype=torch.bfloat16) for _ in range(2))
    buckets = [torch.ones(given.bucket_mb * 250_000, device=world.device) for _ in range(8)]
    streams: dict[str, Stream | None] = {"one stream": None, "two streams": world.new_stream()}
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    hidden: dict[str, list[float]] = {name: [] for name in streams}
    speed = ceiling(left, right)
    shuffle = random.Random(0)  # the same on every rank
    for number in range(given.rounds):
        for name in shuffle.sample(list(streams), 2):
            with trace(world) as log:
                seconds[name].append(step(world, streams[name], left, right, buckets))
            events = [event for event in log.events if event.operation == "all_reduce"]
            total = sum(event.seconds for event in events)
            hidden[name].append(sum(event.hidden_seconds for event in events) / total if total else 0.0)
            if given.output and world.rank == 0:
                log.save_chrome(Path(given.output).with_name(f"gpu_overlap_{name.replace(' ', '_')}.json"))
        if world.rank == 0:
            write(world.size, result, given, f"bf16 products of {side}^3: {speed:.3g} TFLOP/s with nothing beside them",
                  seconds, hidden, quiet=number < given.rounds - 1)  # fmt: skip


def write(
    ranks: int, result: dict[str, Any], given: Any, speed: str, seconds: dict[str, list[float]],
    hidden: dict[str, list[float]], *, quiet: bool,
) -> None:  # fmt: skip
    """Write the table of the rounds so far. speed: a line about the products alone. hidden: a share for each round."""
    rows = RowFile(
        [*heading(f"Overlap on a device, {ranks} ranks", result), "", speed],
        ["| | rounds | ms a step | over one stream | hidden |", "|---|--:|--:|--:|--:|"],
        result | {"ranks": ranks}, output=given.output, json_file=given.json, quiet=quiet,
    )  # fmt: skip
    for name, times in seconds.items():
        cells = [Spread.of([each * 1e3 for each in times]).text(), ratio(times, seconds["one stream"]).text()]
        shares = Spread.of(hidden[name])
        part = f"{shares.median:.0%} [{shares.low:.0%} to {shares.high:.0%}]"
        line = f"| {name} | {len(times)} | {' | '.join(cells)} | {part} |"
        rows.add(line, {"name": name, "seconds": times, "hidden": hidden[name]})
