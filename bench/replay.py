"""Run the collectives of a recorded training step again, without its compute.

    mpiexec -n 4 python -m bench.step --mock-data --vocab-size 8192 --tensor-model-parallel-size 2 --save steps/
    mpiexec -n 4 python -m bench.replay steps/ --output replay.md --json replay.json
    mpiexec -n 2 python -m bench.replay steps/ --scale
    mpiexec -n 2 python -m bench.replay profiles/

bench.step --save records the median of several steps; with ``--steps 1`` it records a single one. Traces of MLCommons
Chakra and PyTorch's profiler are replayed, too; the files' content says which of them they are (docs/traces.md).
A replay has the groups, sizes, dtypes, reductions, streams and order of the step, and waits for a stream where the step
did. A tensor that lay in a window lies in a window again; all tensors are zero. A replay needs as many ranks as were
recorded, on any machine; --scale replays the parts of the first ranks on fewer. If a collective took longer in the step
than alone, the difference is the skew between the ranks and the contention with compute.
"""

from __future__ import annotations

from bench.command.start import answer_help, run_on_ranks
from bench.step_study.options import replay_parser

if __name__ == "__main__":  # before the other imports, which take seconds
    answer_help("bench.replay", lambda: replay_parser(__doc__))

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.command.files import publish
from bench.command.machine import environment, heading
from bench.step_study.replaying import measure
from bench.traces import formats
from commengine import Communicator, UsageError
from commengine.options.parser import OneLineParser
from commengine.rank_zero import on_rank_zero

COMMAND = "bench.replay"


def parser() -> OneLineParser:
    """The command line."""
    return replay_parser(__doc__)


def tables(ranks: Sequence[list[dict[str, Any]]]) -> Iterator[str]:
    """Yield markdown: collectives of one kind in one row, with the mean over the ranks that have them."""
    kinds: defaultdict[tuple[Any, ...], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    groups: defaultdict[tuple[str, tuple[int, ...]], list[dict[str, Any]]] = defaultdict(list)
    for rank, calls in enumerate(ranks):
        for call in calls:
            stream = "yes" if call["stream"] else "no"
            memory = "window" if call["window"] else "private"
            if call["window"] != call["replayed_in_window"]:
                memory += ", replayed in " + ("a window" if call["replayed_in_window"] else "private")
            group = f"{call['group']} ({len(call['ranks'])})"
            key = (group, call["operation"], call["dtype"], call["bytes"], stream, memory)
            kinds[key].append((rank, call))
            groups[call["group"], tuple(call["ranks"])].append(call)
    heads = ("group", "operation", "dtype", "bytes", "stream", "memory", "count", "in step, ms", "isolated, ms")
    yield f"| {' | '.join(heads)} | in step / isolated |"
    yield "|---|---|---|---:|---|---|---:|---:|---:|---:|"
    sums = {
        key: [sum(call[name] for _, call in mine) for name in ("in_step_s", "isolated_s")]
        for key, mine in kinds.items()
    }
    for key, (in_step, alone) in sorted(sums.items(), key=lambda row: -row[1][0]):
        many = len({rank for rank, _ in kinds[key]})
        yield (
            f"| {' | '.join(map(str, key))} | {len(kinds[key]) / many:g} "
            f"| {_step_ms(in_step / many)} | {1e3 * alone / many:.3f} | {_ratio(in_step, alone)} |"
        )
    in_step, alone = (sum(times[which] for times in sums.values()) / len(ranks) for which in (0, 1))
    yield f"| all, a rank | | | | | | | {_step_ms(in_step)} | {1e3 * alone:.3f} | {_ratio(in_step, alone)} |"
    yield from ("", "| group | ranks | bytes recorded | bytes replayed |", "|---|---|---:|---:|")
    for (name, members), mine in groups.items():
        recorded, replayed = (sum(call[kind] for call in mine) for kind in ("bytes", "replayed_bytes"))
        yield f"| {name} | {', '.join(map(str, members))} | {recorded} | {replayed} |"


def _step_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds else ""  # a trace without times has none


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if one and other else "-"  # a trace without times has 0


def main(world: Communicator, argv: Sequence[str] | None = None) -> None:
    """Replay a step, as one rank of the job."""
    surroundings = environment(COMMAND, argv)
    run(world, surroundings, on_rank_zero(world, lambda: read(argv)), publish)


def read(argv: Sequence[str] | None) -> dict[str, Any]:
    """The options and the contents of the trace, as JSON types. Raises UsageError or ValueError that names them."""
    arguments = parser().parse_args(argv)
    return vars(arguments) | {"data": contents(arguments.trace, arguments.groups)}


def contents(trace: str, groups: str | None = None) -> dict[str, Any]:
    """The contents of a trace, in whichever format. groups: the file of --groups. Raises UsageError that names it."""
    return formats.read(Path(trace), Path(groups) if groups else None)


def run(world: Communicator, surroundings: dict[str, Any], options: dict[str, Any], put: Callable[..., None]) -> None:
    """Replay a step. Collective over ``world``.

    options: as `read` returns them. put: writes the tables and the numbers, on rank 0: `publish`, or `write`.
    """
    what = formats.parse(options["data"])
    recorded = what.size
    if world.size != recorded:
        if world.size > recorded or not options["scale"]:
            raise UsageError(
                f"{options['trace']} was recorded on {recorded} ranks, and here are {world.size}: start {recorded}, or "
                "fewer with --scale, which replays the parts of the first ranks"
            )
        what = what.scaled(world.size)
        if not what.groups:
            raise UsageError(
                f"TRACE {options['trace']}: no group has two ranks or more left on {world.size}: nothing to replay"
            )
    rows = measure(world, what, options["warmup"], options["rounds"])
    ranks = world.mpi.gather(rows) or []

    def report() -> None:
        lines = [
            f"- recorded on {recorded} ranks, replayed on {world.size}",
            *(f"- {note}" for note in options["data"].get("notes", ())),
            f"- in step: in the recorded step; isolated: medians of {options['rounds']} replays; sums over a rank's "
            "calls, and of these the mean over the ranks that have the group",
            "",
            *tables(ranks),
        ]
        about = {"recorded_ranks": recorded, "trace_format": options["data"]["format"], "ranks": ranks}
        text = "\n".join([*heading("Replay", surroundings), *lines, ""])
        put(text, surroundings | about, output=options["output"], json_file=options["json"])

    on_rank_zero(world, report)


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
