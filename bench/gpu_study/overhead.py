"""An all-reduce of device tensors by the engine and by torch.distributed, both through NCCL.

The engine runs plainly, traced, with a timeout that watches each call, and on a stream. The programs alternate, each in
processes of its own. A cell is the median over the rounds, with its range, of the time of one call, where a program
enqueues many calls and then waits for the device. For small tensors this is the time that the host takes to enqueue a
call.
"""

from __future__ import annotations

import os
from typing import Any

from bench.command.files import add_files
from bench.command.machine import environment, heading
from bench.command.values import listed, size_of
from bench.contests.all_reduce_options import WAYS
from bench.contests.driver import Contestant, Spread, ratio, rounds, started
from bench.gpu_study.rows import RowFile
from commengine.device.nccl import LAUNCH_ORDER
from trainers.options import COUNT, OneLineParser, between

SIZES = ("8", "64K", "1M", "16M", "256M")
#: bytes of tensors in flight in one step, and the most calls of a step
IN_FLIGHT, MOST_CALLS = 2 << 30, 500
PEER = "torch"


def add_options(parser: OneLineParser) -> None:
    """The options of this study."""
    parser.add_argument(
        "--ranks", type=int, valid=between(1, 1024), default=1, help="processes of each program (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, valid=COUNT, default=11, help="rounds at each size (default: %(default)s)"
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help=f"bytes (default: {' '.join(SIZES)})")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help=f"ways of the engine (default: {' '.join(WAYS)})")
    parser.add_argument("--tiny", action="store_true", help="host tensors and few calls, to try it without a GPU")
    add_files(parser)


def check(given: Any) -> None:
    """Raises ValueError that names the option at fault."""
    given.sizes = [size_of("--sizes", text) for text in given.sizes]
    if small := [size for size in given.sizes if size < 4]:
        raise ValueError(f"--sizes {small[0]}: must be at least 4, an fp32 element")
    given.ways = listed(given.ways, WAYS, "--ways")


def calls(nbytes: int, *, tiny: bool = False) -> int:
    """How many calls a step makes."""
    return 5 if tiny else max(10, min(MOST_CALLS, IN_FLIGHT // nbytes))


def contest(ranks: int, nbytes: int, ways: list[str], count: int, *, number: int, tiny: bool) -> dict[str, list[float]]:
    """Seconds per call of each way and of the peer, in each of ``count`` rounds of ``number`` calls."""
    told = ["--bytes", str(nbytes), "--calls", str(number), *(["--device", "cpu"] if tiny else [])]
    ours = [
        Contestant(way, ranks, ["-m", "bench.contests.engine_all_reduce", "--way", way, *told], mpi=True)
        for way in ways
    ]
    theirs = Contestant(PEER, ranks, ["-m", "bench.peers.all_reduce", *told])
    with started([*ours, theirs]) as running:
        seconds = rounds(running, count, 1)
    return {name: [each / number for each in times] for name, times in seconds.items()}


def run(given: Any) -> None:
    """Compare all at every size. Each row is written when it is measured."""
    os.environ.setdefault(LAUNCH_ORDER, "1")  # the engine sets it, and it costs: the peer's NCCL gets it, too
    result = environment("bench.gpu")
    through = "MPI and gloo (a trial without a GPU)" if given.tiny else "NCCL"
    rows = RowFile(
        heading(f"All-reduce by {through}, {given.ranks} ranks: microseconds a call", result),
        ["| bytes | | us a call | over torch.distributed |", "|--:|---|--:|--:|"],
        result | {"ranks": given.ranks}, output=given.output, json_file=given.json,
    )  # fmt: skip
    for nbytes in given.sizes:
        number = calls(nbytes, tiny=given.tiny)
        seconds = contest(given.ranks, nbytes, given.ways, given.rounds, number=number, tiny=given.tiny)
        for name, times in seconds.items():
            cells = [Spread.of([each * 1e6 for each in times]).text(), ratio(times, seconds[PEER]).text()]
            line = f"| {nbytes} | {'torch.distributed' if name == PEER else name} | {' | '.join(cells)} |"
            rows.add(line, {"bytes": nbytes, "way": name, "seconds": times})
