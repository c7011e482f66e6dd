"""Run the collectives of a recorded training step again, without its compute.

    mpiexec -n 4 python -m bench.step --mock-data --vocab-size 8192 --tensor-model-parallel-size 2 --save steps/
    mpiexec -n 4 python -m bench.replay steps/ --output replay.md --json replay.json
    mpiexec -n 2 python -m bench.replay steps/ --scale
    mpiexec -n 2 python -m bench.replay profiles/

bench.step --save records the median of several steps; ``bench.replay DIR --record`` with the options of pretrain_gpt or
pretrain_bert (--model) records one step in the same way. Traces of MLCommons Chakra, PyTorch's profiler and PARAM are
replayed, too; the files' content says which of them they are (docs/traces.md). A replay has the groups, sizes, dtypes,
reductions, streams and order of the step, and waits for a stream where the step did. A tensor that lay in a window lies
in a window again; all tensors are zero. A replay needs as many ranks as were recorded, on any machine; --scale replays
the parts of the first ranks on fewer. If a collective took longer in the step than alone, the difference is the skew
between the ranks and the contention with compute.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.command.files import add_files, check_writable
from bench.command.machine import environment, heading
from bench.command.parser import TrainerCommandParser, new_trainer_parser
from bench.command.start import run_on_ranks
from bench.step_study import recorder
from bench.step_study.replaying import measure
from bench.traces import formats
from commengine import Communicator, Trace, UsageError
from commengine.rank_zero import on_rank_zero
from trainers.options import COUNT, between

COMMAND = "bench.replay"


def parser() -> TrainerCommandParser:
    """The command line; with --record, the other options are those of the training command."""
    options = new_trainer_parser(COMMAND, __doc__)
    add = options.add_argument
    add(
        "trace",
        metavar="TRACE",
        help="the folder of a recording (rank-0.jsonl, ...), of a Chakra trace (PREFIX.0.et, ..., or DIR/PREFIX) or of "
        "PyTorch's profiles or execution traces (.json or .json.gz, one a rank)",
    )
    add("--groups", metavar="FILE", help="the groups of a Chakra trace: ASTRA-sim's --comm-group-configuration")
    add("--record", action="store_true", help="record a training step of the other options in TRACE")
    recorder.add_model(options)
    formats.add_save_format(options, "--record")
    add("--overwrite", action="store_true", help="with --record: replace the recording that TRACE holds")
    add(
        "--warmup",
        type=int,
        valid=between(0, 10**6),
        default=3,
        help="steps before the recorded one, or replays before those that count (default: %(default)s)",
    )
    add(
        "--rounds",
        type=int,
        valid=COUNT,
        default=7,
        help="replays, whose median is a collective's time (default: %(default)s)",
    )
    add("--scale", action="store_true", help="replay on fewer ranks than were recorded")
    add_files(options, json="write every collective of every rank")
    return options


# ---- recording


def record(
    world: Communicator,
    folder: Path,
    rest: list[str],
    warmup: int,
    *,
    model: str | None = None,
    overwrite: bool = False,
    save_format: str = formats.DEFAULT,
) -> None:
    """Record a step of the training command's options ``rest``, as ``bench.step --save`` does. Collective.

    model: the word of ``--model``, or None. save_format: a name of `formats.WRITTEN`.
    """

    def read() -> dict[str, Any]:
        config = recorder.read_traceable(model, rest, f"python -m {COMMAND} --record", world.size)
        recorder.make_folder(folder, "TRACE", formats.WRITTEN.values(), overwrite=overwrite)
        return recorder.to_json(config)

    config = recorder.from_json(on_rank_zero(world, read))

    def save(trace: Trace, span: tuple[float, float]) -> None:
        formats.save(world, save_format, folder, trace, span)

    log = recorder.record(world, config, warmup, save)
    if world.rank == 0:
        print(f"recorded {len(log.events)} collectives a rank on {world.size} ranks in {folder}\n\n{log.summary()}")


# ---- reporting


def tables(ranks: Sequence[list[dict[str, Any]]]) -> Iterator[str]:
    """Yield markdown: collectives of one kind in one row, with the mean over the ranks that have them."""
    rows: dict[tuple[Any, ...], list[float]] = {}
    holders: dict[tuple[Any, ...], set[int]] = {}
    for rank, calls in enumerate(ranks):
        for call in calls:
            stream = "yes" if call["stream"] else "no"
            memory = "window" if call["window"] else "private"
            if call["window"] != call["replayed_in_window"]:
                memory += ", replayed in " + ("a window" if call["replayed_in_window"] else "private")
            key = (call["group"], len(call["ranks"]), call["operation"], call["dtype"], call["bytes"], stream, memory)
            sums = rows.setdefault(key, [0, 0.0, 0.0])
            sums[0] += 1
            sums[1] += call["in_step_s"]
            sums[2] += call["isolated_s"]
            holders.setdefault(key, set()).add(rank)
    heads = ("group", "operation", "dtype", "bytes", "stream", "memory", "count", "in step, ms", "isolated, ms")
    yield f"| {' | '.join(heads)} | in step / isolated |"
    yield "|---|---|---|---:|---|---|---:|---:|---:|---:|"
    total = [0.0, 0.0]
    for key, (count, in_step, alone) in sorted(rows.items(), key=lambda row: -row[1][1]):
        group, size, operation, dtype, nbytes, stream, memory = key
        many = len(holders[key])
        total = [total[0] + in_step / len(ranks), total[1] + alone / len(ranks)]
        yield (
            f"| {group} ({size}) | {operation} | {dtype} | {nbytes} | {stream} | {memory} | {count / many:g} "
            f"| {_step_ms(in_step / many)} | {1e3 * alone / many:.3f} | {_ratio(in_step, alone)} |"
        )
    yield f"| all, a rank | | | | | | | {_step_ms(total[0])} | {1e3 * total[1]:.3f} | {_ratio(total[0], total[1])} |"
    yield from ("", "| group | ranks | bytes recorded | bytes replayed |", "|---|---|---:|---:|")
    moved: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for calls in ranks:
        for call in calls:
            both = moved.setdefault((call["group"], tuple(call["ranks"])), [0, 0])
            both[0] += call["bytes"]
            both[1] += call["replayed_bytes"]
    for (group, members), (recorded, replayed) in moved.items():
        yield f"| {group} | {', '.join(map(str, members))} | {recorded} | {replayed} |"


def _step_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds else ""  # a trace without times has none


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if one and other else "-"  # a trace without times has 0


def main(world: Communicator, argv: Sequence[str] | None = None) -> None:
    """Record or replay a step, as one rank of the job."""

    def read() -> dict[str, Any]:
        arguments, rest = parser().parse_known_args(argv)
        if not arguments.record and rest:
            raise ValueError(f"{' '.join(rest)}: unknown; a training command's options go with --record")
        if arguments.model and not arguments.record:
            raise ValueError("--model goes with --record")
        if arguments.overwrite and not arguments.record:
            raise ValueError("--overwrite goes with --record")
        arguments.save_format = formats.chosen(arguments.save_format, "--record", given=arguments.record)
        check_writable(json=arguments.json, output=arguments.output)
        found: dict[str, Any] = vars(arguments) | {"rest": rest, "surroundings": environment(COMMAND, argv)}
        if arguments.record:
            return found
        groups = Path(arguments.groups) if arguments.groups else None
        return found | {"data": formats.read(Path(arguments.trace), groups)}

    options = on_rank_zero(world, read)
    if options["record"]:
        more = {name: options[name] for name in ("model", "overwrite", "save_format")}
        record(world, Path(options["trace"]), options["rest"], options["warmup"], **more)
        return
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
        print("\n".join(lines), flush=True)
        if options["output"]:
            text = [*heading("Replay", options["surroundings"]), *lines, ""]
            Path(options["output"]).write_text("\n".join(text))
        if options["json"]:
            about = {"recorded_ranks": recorded, "trace_format": options["data"]["format"], "ranks": ranks}
            result = options["surroundings"] | about
            Path(options["json"]).write_text(json.dumps(result, indent=1))

    on_rank_zero(world, report)


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
