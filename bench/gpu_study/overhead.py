"""An all-reduce of device tensors by the engine and by torch.distributed, both through NCCL.

The two programs alternate, each in processes of its own. A cell is the median over the rounds, with its range, of the
time of one call, where a program enqueues many calls and then waits for the device. For small tensors this is the time
that the host takes to enqueue a call.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from bench.command.files import add_files
from bench.command.machine import environment, heading
from bench.contests.driver import Contestant, Spread, ratio, rounds, started
from bench.gpu_study.rows import RowFile

SIZES = {8: 500, 64 << 10: 500, 1 << 20: 200, 16 << 20: 50, 256 << 20: 10}  # bytes: calls per step


def add_options(parser: ArgumentParser) -> None:
    """The options of this study."""
    parser.add_argument("--ranks", type=int, default=1, help="processes of each program (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="rounds at each size (default: %(default)s)")
    add_files(parser)


def contest(ranks: int, nbytes: int, calls: int, count: int) -> dict[str, list[float]]:
    """Seconds per call of both programs, in each of ``count`` rounds."""
    told = ["--bytes", str(nbytes), "--calls", str(calls)]
    ours = Contestant("commengine", ranks, ["-m", "bench.contests.engine_all_reduce", *told], mpi=True)
    theirs = Contestant("torch", ranks, ["-m", "bench.peers.all_reduce", *told])
    with started([ours, theirs]) as running:
        seconds = rounds(running, count, 1)
    return {name: [each / calls for each in times] for name, times in seconds.items()}


def run(given: Any) -> None:
    """Compare the two at every size. Each row is written when it is measured."""
    result = environment("bench.gpu")
    rows = RowFile(
        heading(f"All-reduce by NCCL, {given.ranks} ranks: microseconds a call", result),
        ["| bytes | commengine | torch.distributed | ratio |", "|--:|--:|--:|--:|"],
        result | {"ranks": given.ranks}, output=given.output, json_file=given.json,
    )  # fmt: skip
    for nbytes, calls in SIZES.items():
        seconds = contest(given.ranks, nbytes, calls, given.rounds)
        cells = [Spread.of([each * 1e6 for each in seconds[name]]).text() for name in ("commengine", "torch")]
        line = f"| {nbytes} | {' | '.join(cells)} | {ratio(seconds['commengine'], seconds['torch']).text()} |"
        rows.add(line, {"bytes": nbytes, "seconds": seconds})
