"""What a halo costs: ``mpiexec -n 2 python -m bench.programs.halo`` prints a line of JSON.

For blocks of 16 x 16 and 64 x 64 points with 8 channels: a halo exchange, and a `tplayers.FieldConv` forward, and with
its backward. Of each the microseconds (the median of rounds), and the Python calls of one in commengine and
tplayers.movement. Two versions of the packages are compared by turns, each with its folder as PYTHONPATH.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import tplayers
from commengine import CartesianGrid, Communicator, Decomposition, launch

ROUNDS, CALLS, WARMUP = 9, 100, 70


def steps(grid: CartesianGrid, points: int) -> dict[str, Callable[[], object]]:
    """The three things that are measured."""
    field = Decomposition.even((2 * points, points), (2, 1))
    conv = tplayers.FieldConv(8, 8, 3, grid, field, padding=1, padding_mode="circular")
    tplayers.initialize(conv, 1)
    x = torch.randn(1, 8, points, points, requires_grad=True)

    def halo() -> None:
        with torch.no_grad():
            tplayers.halo_exchange(x, grid, (1, 1), decomposition=field)

    def forward() -> None:
        with torch.no_grad():
            conv(x)

    def both() -> None:
        conv(x).sum().backward()
        for one in (x, *conv.parameters()):
            one.grad = None

    return {"halo": halo, "forward": forward, "forward and backward": both}


def calls_of(step: Callable[[], object]) -> int:
    """The Python calls of one step in the packages that move its data."""
    found = 0

    def count(frame: Any, event: str, _: object) -> None:
        nonlocal found
        name = frame.f_code.co_filename
        found += event == "call" and ("/commengine/" in name or "/tplayers/movement/" in name)

    sys.setprofile(count)
    step()
    sys.setprofile(None)
    return found


def main(world: Communicator) -> None:
    """Measure, and let rank 0 print."""
    grid, rows = CartesianGrid(world, (2, 1), periodic=True), []
    for points in (16, 64):
        for name, step in steps(grid, points).items():
            for _ in range(WARMUP):
                step()
            times = []
            for _ in range(ROUNDS):
                world.barrier()
                start = time.perf_counter()
                for _ in range(CALLS):
                    step()
                times.append((time.perf_counter() - start) / CALLS * 1e6)
            us = round(statistics.median(times), 1)
            rows.append({"points": points, "step": name, "us": us, "calls": calls_of(step)})
    if world.rank == 0:
        print(json.dumps(rows))


if __name__ == "__main__":
    launch.run(main, device="cpu")
