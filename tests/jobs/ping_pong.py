"""Time messages of the engine between two ranks: ``ping_pong.py FILE ROUNDS``.

FILE has the format of bench.collectives. A time is half a round trip.
The order of the sizes is random and the same on both ranks.
"""

import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch

from commengine import Communicator, launch

SIZES = [8, 64, 512, 4096, 32768, *(1 << k for k in range(17, 22))]


def half_round_trip(world: Communicator, tensor: torch.Tensor) -> float:
    other = 1 - world.rank
    began = time.perf_counter()
    for turn in (0, 1):
        if world.rank == turn:
            world.send(tensor, other)
        else:
            world.recv(tensor, other)
    return (time.perf_counter() - began) / 2


def main(world: Communicator) -> None:
    path, rounds = Path(sys.argv[1]), int(sys.argv[2])
    spent: dict[int, list[float]] = {size: [] for size in SIZES}
    tensors = {size: torch.zeros(size, dtype=torch.uint8) for size in SIZES}
    shuffle = random.Random(0).shuffle
    for size in reversed(SIZES):  # the large ones open the congestion window
        half_round_trip(world, tensors[size])
    for _ in range(rounds):
        order = list(SIZES)
        shuffle(order)
        for size in order:
            world.barrier()
            spent[size].append(half_round_trip(world, tensors[size]))
    if world.rank:
        return
    rows = []
    for size, times in spent.items():
        times.sort()
        # The median's 95% interval by order statistics: the ranks n/2 -+ 0.98 sqrt(n).
        half = 0.98 * rounds**0.5
        low, high = times[max(0, int(rounds / 2 - half))], times[min(rounds - 1, int(rounds / 2 + half))]
        rows.append({
            "operation": "p2p", "transport": "engine", "group": "world", "ranks": 2, "dtype": "uint8", "bytes": size,
            "seconds": {"p50": statistics.median(times), "min": times[0], "max": times[-1]}, "ci": [low, high],
        })  # fmt: skip
    path.write_text(json.dumps({"format": 1, "rows": rows}))


if __name__ == "__main__":
    launch.run(main)
