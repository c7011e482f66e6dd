"""Rows to experts and back: from how many experts a row on is gathering everything no slower?

    mpiexec -n 2 python -m bench.collectives --only experts --output experts.md --plot experts.png

A layer of experts can send each row to the ranks of its k experts, and get k results back: the counts, an all_to_all_v
there, and one back. Or it gathers the rows of all ranks, and adds up the results: an all-gather and a reduce-scatter,
whatever k is. On e ranks both send as much at k = e, if rows go to all experts equally often. With a popular expert its
rank has more to do in the first way, and not in the second.

All tensors lie in windows (--transport shared) or in private memory (engine). Each collective is measured alone, and a
rank has written its input just before, as a layer does: what another core wrote is not in this one's cache. Even
collectives of some sizes are measured, too; by them commengine.cost predicts both ways at each k, with the popular
experts of --skew. All of them take turns in a random order, because other programs take memory bandwidth from time to
time. The crossover is the k at which the ratio of the times passes 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.collective_study.measurement import Measurement
from bench.collective_study.measuring import place_of
from bench.collective_study.points import OURS, model_of_points
from bench.collective_study.switch_points import SwitchedEngine
from bench.command.files import add_files, publish
from bench.command.machine import environment, heading
from bench.command.parser import new_parser
from bench.timing.sampling import Timed, Times
from bench.transports import skew
from bench.transports.in_process import LocalCall, timed
from bench.transports.operations import CollectiveCall
from commengine import Communicator, UsageError, cost
from commengine.cost import FittedModel
from commengine.options.parser import OneLineParser
from commengine.options.ranges import AT_LEAST_ONE, SECONDS
from commengine.rank_zero import on_rank_zero

COMMAND = "bench.collectives --only experts"
#: the even collectives that are measured alone, and the factors of their sizes over the bytes of a rank's rows
ALONE = ("all_to_all_v", "all_gather", "reduce_scatter")
FACTORS = (1 / 64, 1 / 4, 1, 1.5, 2, 3, 4, 8, 16)


def parser() -> OneLineParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--tokens", type=int, valid=AT_LEAST_ONE, default=512, help="rows of a rank before they are sent")
    add("--hidden", type=int, valid=AT_LEAST_ONE, default=512, help="elements of a row, float32")
    add("--most", type=int, valid=AT_LEAST_ONE, default=8, metavar="K", help="the largest number of experts a row")
    add("--skew", nargs="+", choices=skew.NAMES, default=list(skew.NAMES), help="how often the experts are chosen")
    add("--transport", choices=("shared", "engine"), default="shared", help="where the tensors lie")
    add("--time-limit", type=float, valid=SECONDS, default=0.5, help="seconds for one way at one k")
    add_files(options, plot="draw the times over k: .png, .svg or .pdf")
    return options


@dataclass
class TimedCall:
    """A collective that can be timed, each time on an input that this rank has just written.

    call: makes it. input: its. meet: lets the ranks begin together.
    """

    call: Callable[[], object]
    input: torch.Tensor
    meet: Callable[[], object]

    def run(self, count: int) -> tuple[Times, Times]:
        return timed(self.call, count, self._write)

    def _write(self) -> None:
        self.input.fill_(1)
        self.meet()


class Ways:
    """The collectives of the two ways of moving rows on ``comm``.

    memory: two buffers, one for the rows that are sent and one for those that arrive, of the collectives that are
    measured alone: pages of memory differ in speed. tokens, hidden: the rows of a rank and their elements.
    """

    def __init__(self, comm: Communicator, memory: tuple[torch.Tensor, torch.Tensor], tokens: int, hidden: int) -> None:
        self._comm, self._tokens = comm, tokens
        self._given, self._arrived = (
            one[: one.numel() // (4 * hidden) * 4 * hidden].view(torch.float32).view(-1, hidden) for one in memory
        )

    def sent(self, matrix: skew.Matrix) -> list[TimedCall]:
        """Rows to their experts, with the counts, and the results back."""
        comm, rows, counts = self._comm, list(matrix[self._comm.rank]), [row[self._comm.rank] for row in matrix]
        given, results = self._given[: sum(rows)], self._given[: sum(counts)]
        there = partial(comm.exchange_rows, self._arrived, given, rows)
        back = partial(comm.all_to_all_v, self._arrived[: sum(rows)], results, rows, counts)
        return [self._timed(there, given), self._timed(back, results)]

    def gathered(self) -> list[TimedCall]:
        """The rows of all ranks to all ranks, and the sums of the results back."""
        comm, part, whole = self._comm, self._tokens, self._tokens * self._comm.size
        gather = partial(comm.all_gather, self._arrived[:whole], self._given[:part])
        reduce = partial(comm.reduce_scatter, self._arrived[:part], self._given[:whole])
        return [self._timed(gather, self._given[:part]), self._timed(reduce, self._given[:whole])]

    def _timed(self, call: Callable[[], object], input: torch.Tensor) -> TimedCall:
        return TimedCall(call, input, self._comm.mpi.Barrier)


def fitted(times: dict[tuple[str, int], float], ranks: int) -> FittedModel:
    """A model that is linear between the measured sizes. times: seconds, by operation and bytes.

    The all_to_all_v counts as an all_to_all, because its parts are even.
    """
    names = {"all_to_all_v": "all_to_all"}
    return model_of_points([
        Measurement(
            operation=names.get(name, name), bytes=size, ranks=ranks, transport=OURS[0], seconds={"p50": spent}
        )
        for (name, size), spent in times.items()
    ])  # fmt: skip


def main(world: Communicator, argv: Sequence[str]) -> None:
    """Measure; rank 0 prints and writes. Collective over ``world``."""
    result: dict[str, Any] = environment(COMMAND, argv)
    given = on_rank_zero(world, lambda: vars(parser().parse_args(argv)))
    if world.size < 2:
        raise UsageError("rows go to the experts of other ranks: start it with mpiexec -n 2")
    tokens, hidden = given["tokens"], given["hidden"]
    place = place_of(world, world, "world", seconds=given["time_limit"])
    sizes = [max(256, int(4 * tokens * hidden * factor)) for factor in FACTORS]
    calls = [CollectiveCall.of(name, torch.float32, "sum", 0, world.size, size) for name in ALONE for size in sizes]
    cells = [(name, k) for name in given["skew"] for k in range(1, given["most"] + 1)]
    matrices = [skew.of_tokens(name, world.size, k * tokens) for name, k in cells]
    most = 4 * hidden * max(sum(row[rank] for row in matrix) for matrix in matrices for rank in range(world.size))
    with Communicator(world.mpi, device="cpu") as comm:
        capacity = max(most, *(call.nbytes for call in calls))
        engine = SwitchedEngine(comm, capacity, "alone", window=given["transport"] == "shared")
        ways = Ways(comm, engine.memory, tokens, hidden)
        bound = [engine.bind(call, False) for call in calls]
        alone = [TimedCall(one.invoke, one.input, one.meet) for one in bound if isinstance(one, LocalCall)]
        timed_calls: list[Timed] = [*alone, *(one for matrix in matrices for one in ways.sent(matrix))]
        timed_calls += ways.gathered()
        medians = [float(np.median(one.seconds)) for one in place.sample(timed_calls, seed=1)]
        timed_calls.clear()
        del ways, alone, bound
        engine.close()
    pairs = [one + other for one, other in zip(medians[len(calls) :: 2], medians[len(calls) + 1 :: 2], strict=True)]
    model = fitted(
        {(call.operation, call.nbytes): spent for call, spent in zip(calls, medians, strict=False)}, world.size
    )
    rows: list[dict[str, Any]] = []
    for (name, k), matrix, spent in zip(cells, matrices, pairs[:-1], strict=True):
        there, gathered = predicted(model, matrix, tokens, hidden, one_node=not place.by_clock)
        rows.append({
            "skew": name, "k": k, "sent_s": spent, "gathered_s": pairs[-1], "predicted_sent_s": there,
            "predicted_gathered_s": gathered, "busiest_bytes": 4 * hidden * cost.busiest(matrix),
        })  # fmt: skip
    result |= {"ranks": world.size, "model": model.to_json(), "rows": rows}
    on_rank_zero(world, lambda: _conclude(given, result))


def predicted(
    model: FittedModel, matrix: skew.Matrix, tokens: int, hidden: int, *, one_node: bool
) -> tuple[float, float]:
    """The seconds of both ways by the model: there and back, and gathered.

    The model's all_to_all_v was measured with the exchange of its counts.
    """
    sent = [[4.0 * hidden * count for count in row] for row in matrix]
    there = cost.there_and_back_seconds(model, sent, shared_memory=one_node, counts=False)
    return there, cost.gathered_seconds(model, 4.0 * hidden * tokens, len(matrix))


def crossovers(rows: Sequence[dict[str, Any]]) -> tuple[float | None, float | None]:
    """The k at which gathering is no slower, for rows of one skew: measured, and predicted."""
    found = [
        cost.linear_crossover([(0.0, 0.0), *((row["k"], row[f"{of}sent_s"] / row[f"{of}gathered_s"]) for row in rows)])
        for of in ("", "predicted_")
    ]
    return found[0], found[1]


def _conclude(given: dict[str, Any], result: dict[str, Any]) -> None:
    rows, ranks = result["rows"], result["ranks"]
    lines = [*heading("Rows to experts and back", result), *tables(given, ranks, rows), ""]
    publish("\n".join(lines), result, output=given["output"], json_file=given["json"])
    if given["plot"]:
        draw(rows, ranks).savefig(Path(given["plot"]), dpi=120)


def tables(given: dict[str, Any], ranks: int, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the tables."""
    place = "in windows" if given["transport"] == "shared" else "in private memory"
    size = 4 * given["tokens"] * given["hidden"]
    yield f"- {ranks} ranks, {given['tokens']} rows of {given['hidden']} float32 a rank ({size / 1e6:.3g} MB), {place}"
    yield "- sent: the counts, an all_to_all_v there and one back. gathered: an all-gather and a reduce-scatter"
    for name in dict.fromkeys(row["skew"] for row in rows):
        mine = [row for row in rows if row["skew"] == name]
        measured, by_model = crossovers(mine)
        said = [f"no k up to {mine[-1]['k']}" if k is None else f"k = {k:.2f}" for k in (measured, by_model)]
        yield ""
        yield f"## {name}: gathering is no slower from {said[0]} on; predicted: {said[1]}"
        yield ""
        yield "| k | sent, us | gathered, us | sent / gathered | predicted | the busiest rank, GB/s |"
        yield "|---:|---:|---:|---:|---:|---:|"
        for row in mine:
            ratio, other = row["sent_s"] / row["gathered_s"], row["predicted_sent_s"] / row["predicted_gathered_s"]
            rate = 2 * row["busiest_bytes"] / row["sent_s"] / 1e9
            yield (
                f"| {row['k']} | {row['sent_s'] * 1e6:.0f} | {row['gathered_s'] * 1e6:.0f} | {ratio:.2f} | {other:.2f} "
                f"| {rate:.2f} |"
            )


def draw(rows: Sequence[dict[str, Any]], ranks: int) -> Any:
    """The times over k: one line for each skew, one for gathering, and the predictions in dashes."""
    from matplotlib.figure import Figure  # here: it takes a second to load

    from bench.collective_study.tables import LINES

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row["skew"] for row in rows))
    for name, colour in zip(names, LINES, strict=False):
        mine = [row for row in rows if row["skew"] == name]
        k = [row["k"] for row in mine]
        axes.plot(k, [1e3 * row["sent_s"] for row in mine], "o-", color=colour, label=f"sent to experts, {name}")
        axes.plot(k, [1e3 * row["predicted_sent_s"] for row in mine], "--", color=colour, label="predicted")
    k = [row["k"] for row in rows if row["skew"] == names[0]]
    axes.plot(k, [1e3 * rows[0]["gathered_s"]] * len(k), "s-", color="black", label="gathered and reduced")
    axes.plot(k, [1e3 * rows[0]["predicted_gathered_s"]] * len(k), "--", color="black", label="predicted")
    axes.axvline(ranks, color="grey", linewidth=0.8, label=f"k = {ranks} ranks")
    axes.set(xlabel="experts a row (k)", ylabel="milliseconds, there and back", ylim=(0, None), xticks=k)
    axes.legend(fontsize="small", frameon=False)
    return figure
