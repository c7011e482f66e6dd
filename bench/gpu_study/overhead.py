"""An all-reduce of device tensors by the engine and by torch.distributed, both through NCCL.

The engine runs plainly, traced, with a timeout that watches each call, and on a stream. The programs alternate, each in
processes of its own. A cell is the median over the rounds, with its quartiles, of the time of one call, where a program
enqueues many calls and then waits for the device. For small tensors this is the time that the host takes to enqueue a
call.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

from bench.command.values import size_of
from bench.gpu_study.rows import RowFile
from bench.programs.all_reduce import WAYS
from bench.programs.driver import Contestant, rounds, started
from bench.timing.turns import Spread, ratio
from commengine.device.nccl import LAUNCH_ORDER
from commengine.options.parser import OneLineParser
from commengine.options.ranges import COUNT, between

SIZES = ("8", "64K", "1M", "16M", "256M")
#: bytes of tensors in flight in one step, and the most calls of a step
IN_FLIGHT, MOST_CALLS = 2 << 30, 500
PEER = "torch"


def add_options(parser: OneLineParser) -> None:
    """The options of this study."""
    parser.add_argument("--ranks", type=int, valid=between(1, 1024), default=1, help="processes of each program")
    parser.add_argument("--rounds", type=int, valid=COUNT, default=11, help="rounds at each size")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help=f"bytes (default: {' '.join(SIZES)})")


def check(given: Any) -> None:
    """Raises ValueError that names the option at fault."""
    given.sizes = [size_of("--sizes", text) for text in given.sizes]
    if small := [size for size in given.sizes if size < 4]:
        raise ValueError(f"--sizes {small[0]}: must be at least 4, an fp32 element")


def calls(nbytes: int, *, tiny: bool = False) -> int:
    """How many calls a step makes."""
    return 5 if tiny else max(10, min(MOST_CALLS, IN_FLIGHT // nbytes))


def contest(ranks: int, nbytes: int, count: int, *, number: int, tiny: bool) -> dict[str, list[float]]:
    """Seconds per call of each way and of the peer, in each of ``count`` rounds of ``number`` calls."""
    task = {"bytes": nbytes, "calls": number, "device": "cpu" if tiny else "cuda"}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(task, file)
        file.flush()
        ours = [Contestant.of(way, ranks, "bench.programs.all_reduce", file.name, way, mpi=True) for way in WAYS]
        theirs = Contestant.of(PEER, ranks, "bench.peers.all_reduce", file.name)
        with started([*ours, theirs]) as running:
            seconds = rounds(running, count, 1)
    return {name: [each / number for each in times] for name, times in seconds.items()}


def run(given: Any) -> None:
    """Compare all at every size. Each row is written when it is measured."""
    os.environ.setdefault(LAUNCH_ORDER, "1")  # the engine sets it, and it costs: the peer's NCCL gets it, too
    through = "MPI and gloo (a trial without a GPU)" if given.tiny else "NCCL"
    rows = RowFile(
        given, f"All-reduce by {through}, {given.ranks} ranks: microseconds a call",
        ["| bytes | | us a call | over torch.distributed |", "|--:|---|--:|--:|"], ranks=given.ranks,
    )  # fmt: skip
    for nbytes in given.sizes:
        number = calls(nbytes, tiny=given.tiny)
        seconds = contest(given.ranks, nbytes, given.rounds, number=number, tiny=given.tiny)
        for name, times in seconds.items():
            cells = [Spread.of([each * 1e6 for each in times]).text(), ratio(times, seconds[PEER]).text()]
            way = "torch.distributed" if name == PEER else name
            rows.add([nbytes, way, *cells], {"bytes": nbytes, "way": name, "seconds": times})
