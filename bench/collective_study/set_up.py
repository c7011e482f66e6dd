"""What set-up costs on thousands of ranks, of which one is here: its time and the bytes that it sends and gets.

    python -m bench.collectives --only set-up

Each row is a call that all ranks of a group make together, before or between the collectives of a program. This process
plays one rank in the middle of a group. Its MPI is a stand-in: a reduction gives back what this rank gave, and a gather
gives this rank's numbers for every rank. So a time is that of the rank's own work, with the buffers that MPI would
fill. It has no message's time and no other rank in it, and nothing of what MPI itself needs to make communicators.
"""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bench.command.files import add_files, publish
from bench.command.machine import environment, heading
from bench.command.parser import new_parser
from commengine import CartesianGrid, Communicator, GridLayout
from commengine.agreement import agree, each_number, extremes
from commengine.grid import AXES
from commengine.options.parser import OneLineParser
from commengine.options.ranges import COUNT
from commengine.rank_zero import on_every_rank, on_rank_zero
from commengine.shared_memory.nodes import nodes_of
from tplayers import FieldConv, SpectralConv
from tplayers.fields.normalise import moments
from tplayers.fields.same_layer import require_same_layer
from tplayers.movement.compared import compare
from tplayers.movement.plan import repartition_plan

COMMAND = "bench.collectives --only set-up"
RANKS = (64, 1024, 16384)
#: ranks of a node
NODE = 64
#: calls of which the median is taken
CALLS = 5


class OneOfMany:
    """A group of ``size`` ranks for the one of them that is here, as a Communicator, its MPI and its calls."""

    name, checked, order = "alone", False, None

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, size // 2
        self.sent = self.received = 0

    def Allreduce(self, source: Any, target: Any, op: Any) -> None:  # noqa: N802  MPI's name
        del source, op
        self._count(target[0], 1)

    def Allgather(self, source: Any, target: Any) -> None:  # noqa: N802  MPI's name
        self._count(source[0], self.size)
        target[0][:] = source[0] * self.size

    def allreduce(self, value: int, op: Any) -> int:
        del op
        self._count(array("q", (value,)), 1)
        return self.size if value == self.size else value

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        del op
        self._count(tensor.contiguous().numpy(), 1)

    def compare(self, words: str, problem: str | None = None) -> None:
        agree(self, self, words, problem)

    def extremes(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        return extremes(self, numbers)

    def each_number(self, number: int) -> list[int]:
        return each_number(self, number, self.size)

    @contextmanager
    def _making(self, operation: str) -> Iterator[Any]:
        self.compare(operation)
        yield self

    def _count(self, values: Any, ranks: int) -> None:
        nbytes = memoryview(values).nbytes
        self.sent, self.received = self.sent + nbytes, self.received + ranks * nbytes


def rows(size: int) -> Iterator[tuple[str, str, Callable[[Any], object]]]:
    """(call, what it is, the call on a group) for a group of ``size`` ranks."""
    side = 1 << (size.bit_length() - 1) // 2
    shapes = {"a row": (size, 1), "a square": (size // side, side)}
    x = torch.ones(4, 8, 64)

    def nodes(comm: Any) -> object:
        comm.each_number(comm.rank // NODE * NODE)
        return nodes_of([rank // NODE * NODE for rank in range(comm.size)])

    def groups(comm: Any) -> object:
        layout = GridLayout(comm.size, 8, context=2, pipeline=4)
        return [layout.group(comm.rank, axis) for axis in AXES]

    yield "Communicator.compare", "whether all ranks ask for the same", lambda comm: comm.compare("all of us")
    yield "each_number", "a number of each rank", lambda comm: comm.each_number(7)
    yield "on_every_rank", "whether any rank failed", lambda comm: on_every_rank(comm, lambda: None)
    yield "nodes of a group", "which ranks share a node", nodes
    yield "GridLayout", "this rank's groups of tensor 8, context 2, pipeline 4", groups
    yield "tplayers.all_reduce", "the comparison before an operator moves tensors", lambda comm: compare("it", x, comm)
    yield (
        "moments",
        "mean and variance of 64 channels",
        lambda comm: moments(x.permute(0, 2, 1), (0, 2), comm, 32 * comm.size),
    )
    for name, shape in shapes.items():
        field = tuple(4 * ranks for ranks in shape)

        def grid(comm: Any, shape: tuple[int, ...] = shape) -> CartesianGrid:
            return CartesianGrid(comm, shape)

        def made(comm: Any, field: tuple[int, ...] = field, grid: Any = grid) -> Any:
            here = grid(comm)
            return FieldConv(8, 8, 3, here, here.decompose(field), padding=1, padding_mode="circular")

        def first_call(comm: Any, made: Any = made) -> object:
            layer = made(comm)
            block = layer.input.local_shape(layer.grid.coords)
            require_same_layer(layer, torch.ones(1, 8, *block), None, comm)
            return layer

        def turned(comm: Any, field: tuple[int, ...] = field, grid: Any = grid) -> object:
            here = grid(comm).decompose(field)
            there = CartesianGrid(comm, grid(comm).shape[::-1]).decompose(field)
            return repartition_plan(here, there, comm.rank)

        def spectral(comm: Any, field: tuple[int, ...] = field, grid: Any = grid) -> object:
            here = grid(comm)
            return SpectralConv(32, 32, 2, here, here.decompose(field))

        yield f"FieldConv, {name}", "its halo's plan", made
        yield f"FieldConv, {name}: the first call", "the plan, and whether all ranks have the same layer", first_call
        if name == "a square":
            yield "repartition", "from blocks to blocks of the turned grid", turned
        yield f"SpectralConv, {name}", "the plans of its repartitions, 32 channels", spectral


def measured(ranks: Sequence[int], calls: int = CALLS) -> list[dict[str, Any]]:
    """A record for each row and number of ranks: its name, median seconds, and bytes sent and received by a rank."""
    found = []
    for size in ranks:
        for name, what, call in rows(size):
            seconds = []
            for _ in range(calls):
                comm = OneOfMany(size)
                began = time.perf_counter()
                call(comm)
                seconds.append(time.perf_counter() - began)
            found.append({
                "call": name, "what": what, "ranks": size, "seconds": statistics.median(seconds), "sent": comm.sent,
                "received": comm.received,
            })  # fmt: skip
    return found


def table(found: Sequence[dict[str, Any]], ranks: Sequence[int]) -> Iterator[str]:
    """Yield markdown: a row for each call, with milliseconds and bytes that a rank gets for each number of ranks."""
    by = {(one["call"], one["ranks"]): one for one in found}
    names = dict.fromkeys((one["call"], one["what"]) for one in found)
    yield f"| call | what it is |{''.join(f' ms at {size:,} | bytes at {size:,} |' for size in ranks)}"
    yield f"|---|---|{'---:|' * 2 * len(ranks)}"
    for name, what in names:
        cells = "".join(f" {1e3 * by[name, n]['seconds']:.3g} | {by[name, n]['received']:,} |" for n in ranks)
        yield f"| {name} | {what} |{cells}"
    yield ""
    yield (
        f"One rank in the middle; median of {CALLS} calls. bytes: that this rank gets. No message's time is in it, no "
        "other rank's, and nothing that MPI itself needs. A row: the grid has all ranks along one axis."
    )


def parser() -> OneLineParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    options.add_argument(
        "--ranks", type=int, nargs="+", default=list(RANKS), valid=COUNT, metavar="N", help="sizes of the group"
    )
    add_files(options)
    return options


def main(world: Communicator, argv: Sequence[str]) -> None:
    """Measure, print and write, on rank 0. Collective over ``world``."""

    def report() -> None:
        arguments = parser().parse_args(argv)
        wrong = next((size for size in arguments.ranks if size % NODE or not math.log2(size).is_integer()), None)
        if wrong is not None:
            raise ValueError(f"--ranks {wrong}: must be a power of two of at least {NODE}")
        found, told = measured(arguments.ranks), environment(COMMAND, argv)
        text = "\n".join([*heading("Set-up at ranks that are not there", told), "", *table(found, arguments.ranks), ""])
        publish(text, told | {"rows": found}, output=arguments.output, json_file=arguments.json)

    on_rank_zero(world, report)
