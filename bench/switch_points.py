"""Find the sizes from which collectives of host tensors are faster through a node's shared memory than by MPI.

    mpiexec -n 2 python -m bench.switch_points --json here.json --output here-2.md
    mpiexec -n 4 python -m bench.switch_points --json here.json --output here-4.md

Start as many ranks as your jobs have on a node. A file may hold several numbers of ranks. A program then uses the
measured sizes with ``Communicator(..., switch_points=SwitchPoints.load("here.json"))``. In a job that spans nodes,
with as many ranks on each, the two-level collectives are measured instead. A way that a run does not measure keeps its
value in the file, or its default.

A *way* is MPI, a tensor in a window, or the bounce through slots that a private tensor takes. At each size the ways
alternate in random order. A cell is the median over the rounds of the slowest rank's mean time of a call (with
``--statistic min`` the least, for a machine that other programs use too), and in brackets MPI's time over it. A switch
point is the size from which a way has to be taken so that the sum of the logarithms of the times over all sizes is
smallest; one disturbed cell does not move it. It is "never" if the way saves nothing. A way through memory counts as
``--margin`` times slower than it was measured, because it uses the caches of several cores and suffers more than MPI
when other programs use them.

Each state of the machine (bench/timing/states.py) has its own tables. The switch points are for all of them: at each
size the state counts in which the way gains least.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.command.files import add_files, check_writable, publish
from bench.command.machine import environment, heading
from bench.command.parser import CommandParser, new_parser
from bench.command.start import progress, run_on_ranks
from bench.command.values import size_of
from bench.timing.sampling import mean_seconds
from bench.timing.states import States, name_states
from commengine import Communicator, UsageError
from commengine.host.switch_points import KINDS, NEVER, OPERATIONS, REDUCING, Key, Point, SwitchPoints
from commengine.rank_zero import on_rank_zero
from trainers.files.reading import require_regular
from trainers.options import SECONDS, at_least

COMMAND = "bench.switch_points"
SIZES = [1 << shift for shift in range(12, 27)]  # smaller ones go by MPI, because there every microsecond counts
SERIES = [("all_reduce", "full"), ("all_reduce", "half"), ("reduce_scatter", "full"), ("reduce_scatter", "half"),
          ("all_gather", "full"), ("broadcast", "full")]  # fmt: skip
DTYPES = {"full": torch.float32, "half": torch.bfloat16}
LEAST_ROUNDS, MOST_ROUNDS = 5, 101

BY_MPI = SwitchPoints({})
BY_MEMORY = SwitchPoints({Key(name, kind, 2): Point(1, 1, 1) for name in OPERATIONS for kind in KINDS})

STATISTICS: dict[str, Callable[[list[float]], float]] = {"p50": statistics.median, "min": min}

#: by way: the seconds of each round, and the number of the machine's state; None: a state that is not shown
Times = dict[str, list[tuple[float, int | None]]]


def ways_of(
    operation: str, world: Communicator, memory: Communicator, spans: bool
) -> dict[str, tuple[Communicator, bool]]:
    """The ways, by name: the communicator that runs the collective, and whether its tensor lies in a window."""
    if spans:
        return {"mpi": (world, False), "two_level": (memory, False), "two_level, window": (memory, True)}
    return {"mpi": (world, False), "bounce": (memory, False), "window": (memory, True)}


def calls_of(
    ways: dict[str, tuple[Communicator, bool]], operation: str, dtype: torch.dtype, tensors: dict[bool, torch.Tensor],
    nbytes: int,
) -> dict[str, Callable[[], object]]:  # fmt: skip
    """The collective of ``nbytes``, one call for each way.

    tensors: memory for it, private (False) and in a window (True).
    """

    def call(comm: Communicator, windowed: bool) -> Callable[[], object]:
        numel = nbytes // dtype.itemsize // comm.size * comm.size
        whole = tensors[windowed][:nbytes].view(dtype)[:numel]
        part = torch.zeros(numel // comm.size, dtype=dtype)
        if operation == "reduce_scatter":
            return lambda: comm.reduce_scatter(part, whole)
        if operation == "all_gather":
            return lambda: comm.all_gather(whole, part)
        return lambda: getattr(comm, operation)(whole)

    return {name: call(*way) for name, way in ways.items()}


def measure(calls: dict[str, Callable[[], object]], seconds: float, world: Communicator, states: States) -> Times:
    """Seconds of each way in each round.

    It takes about ``seconds`` in all, and at least LEAST_ROUNDS rounds. Collective.
    """
    began = time.perf_counter()
    count = max(1, min(50, int(300e-6 / min(mean_seconds(call, 1, world) for call in calls.values()))))
    times: Times = {name: [] for name in calls}
    order = random.Random(count)  # the same on every rank, because count is; rank 0 decides when to stop
    more = torch.ones(1)
    while more:
        for name in order.sample(list(calls), len(calls)):
            times[name].append(states.turn(partial(warm_seconds, calls[name], count, world)))
        rounds = len(times["mpi"])
        more[0] = rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and time.perf_counter() - began < seconds)
        world.broadcast(more)
    return times


def warm_seconds(call: Callable[[], object], count: int, world: Communicator) -> float:
    """`mean_seconds` after two calls that are not counted, because other ways have used the caches. Collective."""
    mean_seconds(call, 2, world)
    return mean_seconds(call, count, world)


def switch_point(sizes: list[int], mpi: list[float], way: list[float], margin: float = 1.0) -> float:
    """The size from which ``way``, taken as ``margin`` times slower, saves the most in the sum of log time."""
    gains = [math.log(slow / fast / margin) for slow, fast in zip(mpi, way, strict=True)]
    totals = [sum(gains[index:]) for index in range(len(sizes))]
    best = max(range(len(sizes)), key=totals.__getitem__)
    return sizes[best] if totals[best] > 0 else NEVER


def rows_of(sizes: list[int], cells: list[Times], statistic: str, state: int) -> list[dict[str, float]]:
    """The rows of one series in one state: the statistic of each way at each size, in seconds.

    A size at which a way had no round in this state has no row.
    """
    rows = []
    for size, times in zip(sizes, cells, strict=True):
        mine = {name: [value for value, number in values if number == state] for name, values in times.items()}
        if all(mine.values()):
            found = {name: STATISTICS[statistic](values) for name, values in mine.items()}
            rows.append({"bytes": size, "rounds": len(mine["mpi"]), **found})
    return rows


def least_gains(rows: list[dict[str, float]], way: str) -> tuple[list[int], list[float], list[float]]:
    """The sizes, and MPI's and the way's time at each, of the state in which the way gains least over MPI."""
    worst: dict[float, dict[str, float]] = {}
    for row in rows:
        other = worst.get(row["bytes"], row)
        worst[row["bytes"]] = min(row, other, key=lambda one: one["mpi"] / one[way])
    sizes = sorted(worst)
    return [int(size) for size in sizes], [worst[size]["mpi"] for size in sizes], [worst[size][way] for size in sizes]


def table(title: str, rows: list[dict[str, float]], points: dict[str, float]) -> list[str]:
    """The lines of one series in markdown."""
    ways = list(rows[0])[2:]
    chosen = "; ".join(f"{way} {f'from {b:,.0f} bytes' if b < NEVER else 'never'}" for way, b in points.items())
    lines = [f"## {title}: {chosen}", "", "| bytes | rounds | " + " | ".join(f"{way}, us" for way in ways) + " |",
             "|---:|---:|" + "---:|" * len(ways)]  # fmt: skip
    for row in rows:
        cells = [
            f"{row[way] * 1e6:,.1f}" + (f" ({row['mpi'] / row[way]:.2f}x)" if way != "mpi" else "") for way in ways
        ]
        lines.append(f"| {row['bytes']:,.0f} | {row['rounds']:.0f} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add(
        "--seconds",
        type=float,
        valid=SECONDS,
        default=120.0,
        help="about the time of the whole run (default: %(default)s)",
    )
    add("--largest", default="64M", metavar="SIZE", help="the largest size, from 4K to 64M (default: %(default)s)")
    add("--statistic", choices=STATISTICS, default="p50", help="statistic over the rounds (default: %(default)s)")
    add("--margin", type=float, valid=at_least(1), default=1.05, metavar="FACTOR",
        help="leave MPI only for a way that takes less than 1 / FACTOR of its time (default: %(default)s)")  # fmt: skip
    add_files(options, json="write the file that SwitchPoints.load reads, or complete it")
    return options


def parse(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The settings that the command line gives, as JSON types. Raises ValueError that names the option at fault."""
    given = parser().parse_args(argv)
    largest = size_of("--largest", given.largest)
    if not SIZES[0] <= largest <= SIZES[-1]:
        raise ValueError(f"--largest {given.largest}: valid: from {SIZES[0] >> 10}K to {SIZES[-1] >> 20}M")
    check_writable(json=given.json, output=given.output)
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


def points_of(
    measured: dict[tuple[str, str], list[Times]], sizes: list[int], shown: list[int], chosen: dict[str, Any]
) -> tuple[dict[tuple[str, str], dict[str, float]], list[str]]:
    """The switch points by series, and the lines of their tables. shown: the numbers of the states."""
    found, lines = {}, []
    for (operation, kind), cells in measured.items():
        by_state = {state: rows_of(sizes, cells, chosen["statistic"], state) for state in shown}
        every = [row for rows in by_state.values() for row in rows]
        ways = [name for name in Point._fields if name in cells[0]]
        points = {name: switch_point(*least_gains(every, name), chosen["margin"]) for name in ways}
        found[operation, kind] = points
        for state, name in name_states(shown).items():
            title = f"{operation}, {kind}{f', {name}' if len(shown) > 1 else ''}"
            lines += table(title, by_state[state], points) if by_state[state] else []
    return found, lines


def main(launched: Communicator, argv: Sequence[str] | None = None) -> int:
    """Measure; rank 0 prints and writes. Collective over ``launched``."""
    result: dict[str, Any] = environment(COMMAND)  # before measuring: the load average is that of other programs
    chosen = on_rank_zero(launched, lambda: parse(argv))
    sizes = chosen["sizes"]
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
        tensors = {False: torch.zeros(sizes[-1], dtype=torch.uint8), True: memory.empty((sizes[-1],), torch.uint8)}
        tensors[True].zero_()
        measured: dict[tuple[str, str], list[Times]] = {}
        states = States(world.mpi)
        series = [names for names in SERIES if names[0] in REDUCING] if spans else SERIES
        ends, cells_left = time.perf_counter() + chosen["seconds"], len(series) * len(sizes)
        with progress(launched, cells_left) as bar:
            for operation, kind in series:
                ways = ways_of(operation, world, memory, spans)
                cells = []
                for size in sizes:
                    bar.set_description(f"{operation} {kind} {size} B")
                    calls = calls_of(ways, operation, DTYPES[kind], tensors, size)
                    left = (ends - time.perf_counter()) / cells_left
                    cells.append(measure(calls, left, world, states))
                    cells_left -= 1
                    bar.update()
                measured[operation, kind] = cells
        del tensors, calls
    for times in (times for cells in measured.values() for times in cells):
        for name, values in times.items():
            numbers = states.assigned([number or 0 for _, number in values])
            times[name] = [(value, number) for (value, _), number in zip(values, numbers, strict=True)]
    found, lines = points_of(measured, sizes, states.shown(), chosen)

    def conclude() -> None:
        nodes = launched.size // node
        where = f"{launched.size} ranks" + (f" on {nodes} nodes" if nodes > 1 else " on one node")
        text = "\n".join(
            [
                *heading("Switch points", result),
                f"- {where}; full: float32, half: bfloat16; {chosen['statistic']} of the rounds; "
                f"a way is taken where MPI needs {chosen['margin']:g} times as long or more",
                *states.lines(),
                "",
                *lines,
            ]
        )
        publish(text, result, output=chosen["output"])
        if chosen["json"]:
            completed(before(chosen["json"]), node, found).save(Path(chosen["json"]))

    on_rank_zero(launched, conclude)
    return 0


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
