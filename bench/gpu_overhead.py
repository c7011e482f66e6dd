"""An all-reduce of device tensors: the engine's against torch.distributed's, both by NCCL. Needs a GPU.

    python -m bench.gpu_overhead --ranks 1 --output bench/results/gpu_overhead.md

The two alternate, each in processes of its own. A cell is the median over the rounds, with its range, of the time of
one of many calls that are enqueued together, until the device is done: small ones show what enqueuing costs the host.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.command.machine import environment, heading
from bench.contests.driver import Contestant, Spread, ratio, rounds, started

SIZES = {8: 500, 64 << 10: 500, 1 << 20: 200, 16 << 20: 50, 256 << 20: 10}  # bytes: calls per step


def contest(ranks: int, nbytes: int, calls: int, count: int) -> dict[str, list[float]]:
    """Seconds per call of both, in every round."""
    told = ["--bytes", str(nbytes), "--calls", str(calls)]
    ours = Contestant("commengine", ranks, ["-m", "bench.contests.engine_all_reduce", *told], mpi=True)
    theirs = Contestant("torch", ranks, ["-m", "bench.peers.all_reduce", *told])
    with started([ours, theirs]) as running:
        seconds = rounds(running, count, 1)
    return {name: [each / calls for each in times] for name, times in seconds.items()}


def main() -> None:
    """Measure, print and write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, default=1)
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument("--output", type=Path, help="write the table as markdown")
    arguments = options.parse_args()
    result = environment("bench.gpu_overhead")
    lines = heading(f"All-reduce by NCCL, {arguments.ranks} ranks: microseconds a call", result)
    lines += ["", "| bytes | commengine | torch.distributed | ratio |", "|--:|--:|--:|--:|"]
    for nbytes, calls in SIZES.items():
        seconds = contest(arguments.ranks, nbytes, calls, arguments.rounds)
        cells = [Spread.of([each * 1e6 for each in seconds[name]]).text() for name in ("commengine", "torch")]
        lines.append(f"| {nbytes} | {' | '.join(cells)} | {ratio(seconds['commengine'], seconds['torch']).text()} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
        arguments.output.with_suffix(".json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
