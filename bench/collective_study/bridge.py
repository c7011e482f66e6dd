"""What a call over a bridge costs beside the same bytes over plain MPI: a field there, and a field back.

    mpiexec -n 2 python -m bench.collectives --only bridge

The first half of the ranks is the program that asks, the second half answers with the field as it is. The plain
exchange sends as many bytes between the same ranks, by ``Isend`` and ``Irecv`` of buffers that exist, and nothing else:
no number of the call, no new tensor for a result. The two take turns. The field is in rows on the ranks that ask, and
in rows or in columns on the others: for columns the bridge copies the parts of a block together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from bench.command.files import Kept, add_files, publish, write_unfinished
from bench.command.machine import environment, heading
from bench.command.parser import new_parser
from bench.command.values import size_of
from commengine import Communicator, Decomposition, UsageError, launch
from commengine.mpi import load_mpi, reduced
from commengine.options.parser import OneLineParser
from commengine.options.ranges import COUNT
from commengine.rank_zero import on_rank_zero
from tplayers import Bridge, BridgeField

COMMAND = "bench.collectives --only bridge"
SIZES = ("32K", "256K", "2M", "16M", "64M")


def exchanges(bridge: Bridge, asks: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each way, and its call there and back."""
    field = bridge.gives
    x = torch.ones(field.local_shape(bridge.comm.rank), dtype=field.dtype)
    counts = {part.peer: x[part.at].numel() for part in bridge._parts[0]}
    there, back = ({peer: np.ones(count) for peer, count in counts.items()} for _ in range(2))

    def send() -> None:
        load_mpi().Request.Waitall([bridge._other.Isend(buffer, peer) for peer, buffer in there.items()])

    def receive() -> None:
        load_mpi().Request.Waitall([bridge._other.Irecv(buffer, peer) for peer, buffer in back.items()])

    def plain() -> None:
        for one in (send, receive) if asks else (receive, send):
            one()

    def over_the_bridge() -> None:
        if asks:
            bridge.call(x)
        else:
            bridge.answer(lambda received: received)

    yield "bridge", over_the_bridge
    yield "plain", plain


def measured(bridge: Bridge, asks: bool, rounds: int) -> dict[str, float]:
    """The median seconds of each way on the slowest rank that asks. Collective over both programs."""
    spent: dict[str, list[float]] = {}
    ways = list(exchanges(bridge, asks))
    for number in range(rounds + 2):
        for name, call in ways[:: 1 if number % 2 else -1]:
            bridge._other.Barrier()
            began = time.perf_counter()
            call()
            slowest = reduced(bridge.comm.mpi, time.perf_counter() - began, load_mpi().MAX)
            if number >= 2:
                spent.setdefault(name, []).append(slowest)
    return {name: statistics.median(several) for name, several in spent.items()}


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield markdown: for each size and layout both times, and their ratio."""
    yield "| field | on the other ranks | bridge, us | plain MPI, us | plain / bridge |"
    yield "|---:|---|---:|---:|---:|"
    for row in rows:
        ours, plain = 1e6 * row["bridge"], 1e6 * row["plain"]
        yield f"| {row['bytes']:,} B | {row['layout']} | {ours:.0f} | {plain:.0f} | {plain / ours:.2f} |"


def parser() -> OneLineParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--sizes", nargs="+", default=list(SIZES), metavar="SIZE", help="bytes of the field, of all ranks")
    add("--rounds", type=int, default=31, valid=COUNT, help="pairs of exchanges of which the median is taken")
    add_files(options)
    return options


def main(world: Communicator, argv: Sequence[str]) -> None:
    """Measure; rank 0 prints and writes. Collective over ``world``."""
    told = environment(COMMAND, argv)
    given = on_rank_zero(world, lambda: vars(parser().parse_args(argv)))
    sizes = on_rank_zero(world, lambda: [size_of("--sizes", size) for size in given["sizes"]])
    if world.size < 2:
        raise UsageError("a bridge has two programs: start it with mpiexec -n 2")
    asks = world.rank < world.size // 2
    rows: list[dict[str, Any]] = []
    kept = Kept(lambda: write_unfinished(given["json"], told | {"rows": rows}))
    with launch.split_world(int(not asks), comm=world.mpi) as part, Communicator(part.comm, device="cpu") as comm:
        for size in sizes:
            edge = max(round((size / 8) ** 0.5), world.size)
            for layout in ("rows", "columns") if world.size > 2 else ("rows",):
                grid = (1, comm.size) if layout == "columns" and not asks else (comm.size, 1)
                field = BridgeField(Decomposition.even((edge, edge), grid))
                bridge = Bridge(part.other, comm, field, field)
                found = measured(bridge, asks, given["rounds"])
                rows.append({"bytes": 8 * edge * edge, "layout": layout, **found})
                if not asks:
                    bridge.answer(lambda received: received)  # the end
                bridge.close()
                on_rank_zero(world, kept)
    if world.rank == 0:
        text = "\n".join(
            [*heading("A call over a bridge, beside the same bytes over plain MPI", told), "", *table(rows), ""]
        )
        publish(text, told | {"rows": rows}, output=given["output"], json_file=given["json"])
