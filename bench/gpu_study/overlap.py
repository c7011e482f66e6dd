"""All-reduces of device tensors beside matrix products, on the products' CUDA stream and on a stream of their own.

Each round runs the same products and all-reduces in all ways, in random order. The second stream has a high priority.
With one rank NCCL has nothing to send. "With small ones": each pair of products is followed by an all-reduce of 0.5 MB
on the products' stream, too, as in a tensor-parallel backward pass. NCCL_LAUNCH_ORDER_IMPLICIT=1 lets it start only
when the large ones that were enqueued before it have started; 0 does not.

"Hidden" is the share of the large all-reduces' time that no product waited for, as a median over the rounds with its
quartiles. The timelines of the last round are written beside the table, for chrome://tracing.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import torch

from bench.gpu_study.flops import ceiling
from bench.gpu_study.rows import RowFile, finish
from bench.timing.turns import Spread, ratio
from commengine import Communicator, trace
from commengine.device.nccl import LAUNCH_ORDER
from commengine.options.parser import OneLineParser
from commengine.options.ranges import COUNT, between
from commengine.stream import Stream, Work

SIDE, TINY_SIDE = 8192, 128


def add_options(parser: OneLineParser) -> None:
    """The options of this study."""
    add, most = parser.add_argument, between(1, 2**16)
    add("--rounds", type=int, valid=COUNT, default=15, help="rounds")
    add("--bucket-mb", type=int, valid=most, default=40, help="MB of each all-reduce")


def step(
    world: Communicator, stream: Stream | None, left: torch.Tensor, right: torch.Tensor, buckets: list[torch.Tensor],
    small: torch.Tensor | None,
) -> float:  # fmt: skip
    """Seconds of products, each pair followed by the all-reduce of a bucket, as in a backward pass.

    small: is reduced on the products' stream after each pair; None: nothing is.
    """
    world.barrier()
    finish(world.device)
    start = time.perf_counter()
    works: list[Work] = []
    for bucket in buckets:
        for _ in range(2):
            left @ right
        if small is not None:
            world.all_reduce(small, "avg")
        works.append(world.all_reduce(bucket, "avg", stream=stream))
    for work in works:
        work.wait()
    finish(world.device)
    return time.perf_counter() - start


def run(world: Communicator, given: Any) -> None:
    """Measure; rank 0 prints and writes. Both rows are written after every round, over the rounds so far."""
    side = TINY_SIDE if given.tiny else SIDE
    left, right = (torch.randn(side, side, device=world.device, dtype=torch.bfloat16) for _ in range(2))
    buckets = [torch.ones(given.bucket_mb * 250_000, device=world.device) for _ in range(8)]
    small, stream = torch.ones(250_000, device=world.device, dtype=torch.bfloat16), world.new_stream()
    ways: dict[str, tuple[Stream | None, torch.Tensor | None]] = {
        "one stream": (None, None), "two streams": (stream, None),
        "one stream, with small ones": (None, small), "two streams, with small ones": (stream, small),
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    hidden: dict[str, list[float]] = {name: [] for name in ways}
    speed = ceiling(world.device, side) / 1e12
    shuffle = random.Random(0)  # the same on every rank
    for number in range(given.rounds):
        for name in shuffle.sample(list(ways), len(ways)):
            with trace(world) as log:
                seconds[name].append(step(world, ways[name][0], left, right, buckets, ways[name][1]))
            events = [one for one in log.events if one.operation == "all_reduce" and one.bytes > small.nbytes]
            total = sum(event.seconds for event in events)
            hidden[name].append(sum(event.hidden_seconds for event in events) / total if total else 0.0)
            if given.output and world.rank == 0:
                file = f"gpu_overlap_{name.replace(', ', ' ').replace(' ', '_')}.json"
                log.save_chrome(Path(given.output).with_name(file))
        if world.rank == 0:
            write(world.size, given, f"bf16 products of {side}^3: {speed:.3g} TFLOP/s with nothing beside them",
                  seconds, hidden, quiet=number < given.rounds - 1)  # fmt: skip


def write(
    ranks: int, given: Any, speed: str, seconds: dict[str, list[float]], hidden: dict[str, list[float]], *, quiet: bool
) -> None:
    """Write the table of the rounds so far. speed: a line about the products alone. hidden: a share for each round."""
    rows = RowFile(
        given, f"Overlap on a device, {ranks} ranks",
        ["| | rounds | ms a step | over one stream | hidden |", "|---|--:|--:|--:|--:|"],
        [speed, f"{LAUNCH_ORDER}={os.environ.get(LAUNCH_ORDER, '')}"], quiet=quiet, ranks=ranks,
    )  # fmt: skip
    for name, times in seconds.items():
        alike, shares = seconds[name.replace("two streams", "one stream")], Spread.of(hidden[name])
        part = f"{shares.median:.0%} [{shares.low:.0%} to {shares.high:.0%}]"
        cells = [Spread.of([each * 1e3 for each in times]).text(), ratio(times, alike).text(), part]
        rows.add([name, len(times), *cells], {"name": name, "seconds": times, "hidden": hidden[name]})
