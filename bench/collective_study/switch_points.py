"""The sizes from which collectives of host tensors are faster through a node's shared memory than by MPI.

    mpiexec -n 2 python -m bench.collectives --only switch-points --json here.json --output here-2.md
    mpiexec -n 4 python -m bench.collectives --only switch-points --json here.json --output here-4.md

Start as many ranks as your jobs have on a node. A file may hold several numbers of ranks. A program then uses the
measured sizes with ``Communicator(..., switch_points=SwitchPoints.load("here.json"))``. In a job that spans nodes,
with as many ranks on each, the two-level collectives are measured instead. A way that a run does not measure keeps its
value in the file, or its default.

A *way* is MPI, a tensor in a window, or the bounce through slots that a private tensor takes. At each size the ways
alternate in random order, and calls are timed as bench.collectives times them. A cell is the median of the calls' times
(with ``--statistic min`` the least, for a machine that other programs use too), and in brackets MPI's time over it. A
switch point is the size from which a way has to be taken so that the sum of the logarithms of the times over all sizes
is smallest; one disturbed cell does not move it. It is "never" if the way saves nothing. A way through memory counts as
``--margin`` times slower than it was measured, because it uses the caches of several cores and suffers more than MPI
when other programs use them.

Each state of the machine (bench/timing/states.py) has its own tables. The switch points are for all of them: at each
size the state counts in which the way gains least.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.collective_study.measurement import Measurement, comparable
from bench.collective_study.measuring import measure_call, place_of
from bench.collective_study.shown_states import of_shown_states
from bench.command.files import add_files, publish
from bench.command.machine import environment, heading
from bench.command.parser import new_parser
from bench.command.start import progress
from bench.command.values import size_of
from bench.timing.sampling import Stopping
from bench.transports.in_process import Engine
from bench.transports.operations import CollectiveCall
from commengine import Communicator, UsageError
from commengine.files.reading import require_regular
from commengine.host.switch_points import KINDS, NEVER, OPERATIONS, REDUCING, Key, Point, SwitchPoints
from commengine.options.parser import OneLineParser
from commengine.options.ranges import SECONDS, at_least
from commengine.rank_zero import on_rank_zero

COMMAND = "bench.collectives --only switch-points"
SIZES = [1 << shift for shift in range(12, 27)]  # smaller ones go by MPI, because there every microsecond counts
SERIES = [("all_reduce", "full"), ("all_reduce", "half"), ("reduce_scatter", "full"), ("reduce_scatter", "half"),
          ("all_gather", "full"), ("broadcast", "full")]  # fmt: skip
DTYPES = {"full": torch.float32, "half": torch.bfloat16}

BY_MPI = SwitchPoints({})
BY_MEMORY = SwitchPoints(
    {Key(name, kind, 2**n): Point(1, 1, 1) for name in OPERATIONS for kind in KINDS for n in range(1, 12)}
)

#: a size in a state of the machine: "bytes", "state", "calls", and the seconds by each way
Cell = dict[str, Any]


class SwitchedEngine(Engine):
    """The engine on private tensors or on tensors in windows of ``group``, which has switch points of its own."""

    def __init__(self, group: Communicator, capacity: int, name: str, *, window: bool) -> None:
        self.name, self._window = name, window
        super().__init__(group, capacity)

    def _memory(self, capacity: int) -> torch.Tensor:
        return self._group.empty((capacity,), torch.uint8).zero_() if self._window else super()._memory(capacity)


def cells_of(rows: Sequence[Measurement], statistic: str) -> list[Cell]:
    """The cells of one series, by size, of the rows of all ways.

    Rows count that may be compared. A state in which a way has no row has no cell, unless no state has all ways: then
    the rows with most calls count.
    """
    ways = list(dict.fromkeys(row.transport for row in rows))
    counted = comparable(rows)
    found: list[Cell] = []
    for size in sorted({row.bytes for row in counted}):
        mine = sorted((row for row in counted if row.bytes == size), key=lambda row: row.calls)
        if len({row.transport for row in mine}) < len(ways):
            continue
        states: dict[str, dict[str, Measurement]] = {}
        for row in mine:
            states.setdefault(str(row.state or ""), {})[row.transport] = row
        whole = {state: of for state, of in sorted(states.items()) if len(of) == len(ways)}
        for state, of in (whole or {"several states": {row.transport: row for row in mine}}).items():
            times = {way: of[way].seconds[statistic] for way in ways}
            found.append({"bytes": size, "state": state, "calls": of["mpi"].calls, **times})
    return found


def switch_point(cells: Sequence[Cell], way: str, margin: float = 1.0) -> float:
    """The size from which ``way``, taken as ``margin`` times slower, saves the most in the sum of log time.

    At each size the state counts in which the way gains least over MPI.
    """
    gains: dict[int, float] = {}
    for cell in cells:
        gain = math.log(cell["mpi"] / cell[way] / margin)
        gains[cell["bytes"]] = min(gain, gains.get(cell["bytes"], gain))
    sizes = sorted(gains)
    totals = {size: sum(gains[other] for other in sizes if other >= size) for size in sizes}
    best = max(sizes, key=totals.__getitem__)
    return best if totals[best] > 0 else NEVER


def tables(title: str, cells: Sequence[Cell], points: dict[str, float]) -> list[str]:
    """The lines of one series in markdown, with a table for each state of the machine."""
    if not cells:
        return [f"## {title}: no size has rows of all ways that may be compared; its switch points stay", ""]
    ways = list(cells[0])[3:]
    chosen = "; ".join(f"{way} {f'from {b:,.0f} bytes' if b < NEVER else 'never'}" for way, b in points.items())
    lines = []
    for state in dict.fromkeys(cell["state"] for cell in cells):
        heads = "".join(f" {way}, us |" for way in ways)
        lines += [f"## {title}{f', {state}' if state else ''}: {chosen}", "", f"| bytes | calls |{heads}"]
        lines.append("|---:|---:|" + "---:|" * len(ways))
        for cell in (cell for cell in cells if cell["state"] == state):
            times = [
                f"{cell[way] * 1e6:,.1f}" + (f" ({cell['mpi'] / cell[way]:.2f}x)" if way != "mpi" else "")
                for way in ways
            ]
            lines.append(f"| {cell['bytes']:,} | {cell['calls']} | {' | '.join(times)} |")
        lines.append("")
    return lines


def parser() -> OneLineParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--seconds", type=float, valid=SECONDS, default=120.0, help="at most about the time of the whole run")
    add("--largest", default="64M", metavar="SIZE", help="the largest size, from 4K to 64M")
    add("--statistic", choices=("p50", "min"), default="p50", help="statistic over the calls")
    add("--margin", type=float, valid=at_least(1), default=1.05, metavar="FACTOR",
        help="leave MPI only for a way that takes less than 1 / FACTOR of its time")  # fmt: skip
    add_files(options, json="write the file that SwitchPoints.load reads, or complete it")
    return options


def parse(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The settings that the command line gives, as JSON types. Raises ValueError that names the option at fault."""
    given = parser().parse_args(argv)
    largest = size_of("--largest", given.largest)
    if not SIZES[0] <= largest <= SIZES[-1]:
        raise ValueError(f"--largest {given.largest}: valid: from {SIZES[0] >> 10}K to {SIZES[-1] >> 20}M")
    before(given.json)
    return {**vars(given), "sizes": [size for size in SIZES if size <= largest]}


def before(path: str | None) -> SwitchPoints:
    """The switch points in the file of ``--json``, or the defaults if there is no such file yet."""
    try:
        return SwitchPoints.load(require_regular(path)) if path and Path(path).exists() else SwitchPoints.load()
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"--json {path}: holds something else than switch points, so it cannot be completed: {error}"
        ) from error


def completed(base: SwitchPoints, node: int, found: dict[tuple[str, str], dict[str, float]]) -> SwitchPoints:
    """``base`` with the points that were found, by series, for ``node`` ranks on a node. Sizes are whole bytes."""
    rows = dict(base.rows)
    for (operation, kind), points in found.items():
        rows[Key(operation, kind, node)] = base.point(operation, DTYPES[kind], node)._replace(**points)
    return SwitchPoints({key: Point(*(b if b == NEVER else int(b) for b in point)) for key, point in rows.items()})


def main(launched: Communicator, argv: Sequence[str]) -> None:
    """Measure; rank 0 prints and writes. Collective over ``launched``."""
    result: dict[str, Any] = environment(COMMAND, argv)  # before measuring: the load average is that of other programs
    chosen = on_rank_zero(launched, lambda: parse(argv))
    if launched.size < 2:
        raise UsageError("a switch point needs two ranks or more: start it with mpiexec -n 2")
    with (
        Communicator(launched.mpi, device="cpu", switch_points=BY_MPI) as world,
        Communicator(launched.mpi, device="cpu", switch_points=BY_MEMORY) as memory,
    ):
        node = memory.node_size
        if node is None:
            raise UsageError("a switch point needs the same number of ranks, at least 2, on every node")
        spans = node < world.size
        series = [names for names in SERIES if names[0] in REDUCING] if spans else SERIES
        place = place_of(world, world, "world")
        plan = {
            (name, kind): [CollectiveCall.of(name, DTYPES[kind], "sum", 0, world.size, n) for n in chosen["sizes"]]
            for name, kind in series
        }
        capacity = max(call.nbytes for calls in plan.values() for call in calls)
        ways = [SwitchedEngine(world, capacity, "mpi", window=False)]
        ways.append(SwitchedEngine(memory, capacity, "two_level" if spans else "bounce", window=False))
        ways.append(SwitchedEngine(memory, capacity, "two_level, window" if spans else "window", window=True))
        ways[1]._buffers = ways[0]._buffers  # two buffers collide differently in the caches
        measured: dict[tuple[str, str], list[Measurement]] = {names: [] for names in plan}
        ends, left = time.perf_counter() + chosen["seconds"], len(plan) * len(chosen["sizes"])
        found: dict[tuple[str, str], dict[str, float]] = {}
        shown: dict[tuple[str, str], list[Cell]] = {}

        def keep(operation: str, kind: str) -> None:
            """Complete the file with this series, so that a command that is stopped keeps it."""
            rows = of_shown_states(measured[operation, kind], place.states)
            shown[operation, kind] = cells = cells_of(rows, chosen["statistic"])
            names = [name for name in Point._fields if cells and name in cells[0]]
            found[operation, kind] = {name: switch_point(cells, name, chosen["margin"]) for name in names}
            if chosen["json"]:
                completed(before(chosen["json"]), node, found).save(Path(chosen["json"]))

        with progress(launched, left) as bar:
            for (operation, kind), calls in plan.items():
                for call in calls:
                    bar.set_description(f"{operation} {kind} {call.nbytes} B")
                    seconds = max(0.001, (ends - time.perf_counter()) / left / len(ways))
                    now = replace(place, stopping=Stopping(seconds=seconds, warmup=2))
                    rows, _ = measure_call(now, call, ways, [operation != "all_gather"], seed=left)
                    measured[operation, kind] += rows
                    left -= 1
                    bar.update()
                on_rank_zero(launched, lambda: keep(operation, kind))  # noqa: B023  called at once
        for way in ways:
            way.close()

        def conclude() -> None:
            nodes = launched.size // node
            where = f"{launched.size} ranks" + (f" on {nodes} nodes" if nodes > 1 else " on one node")
            lines = [
                *heading("Switch points", result),
                f"- {where}; full: float32, half: bfloat16; {chosen['statistic']} of the calls; "
                f"a way is taken where MPI needs {chosen['margin']:g} times as long or more",
                *(place.states.lines() if place.states else ()),
                "",
            ]
            for operation, kind in measured:
                keep(operation, kind)  # again, because the states of the machine are told apart better now
                lines += tables(f"{operation}, {kind}", shown[operation, kind], found[operation, kind])
            publish("\n".join(lines), result, output=chosen["output"])

        on_rank_zero(launched, conclude)
