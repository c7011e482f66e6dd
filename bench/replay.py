"""Run the collectives of a recorded training step again, without its compute: the time of each alone, beside its time
there.

    mpiexec -n 4 python -m bench.step --mock-data --vocab-size 8192 --tensor-model-parallel-size 2 --save steps/
    mpiexec -n 4 python -m bench.replay steps/ --output replay.md --json replay.json
    mpiexec -n 2 python -m bench.replay steps/ --scale

bench.step --save records the median of several steps; ``bench.replay DIR --record`` with pretrain_gpt's options
records one step in the same way. A replay has the groups, sizes, dtypes, reductions, streams and order of the step,
and waits for a stream where the step did. A tensor that lay in a window lies in a window again; all tensors are zero.
A replay needs as many ranks as were recorded, on any machine; --scale replays the parts of the first ranks on fewer.
If a collective took longer in the step than alone, the difference is the skew between the ranks and the contention
with compute.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.command.files import add_files, check_writable
from bench.command.machine import environment, heading
from bench.command.parser import TrainerCommandParser, new_trainer_parser
from bench.command.start import run_on_ranks
from bench.command.values import check_least
from bench.step_study import recorder, recording
from bench.step_study.recording import RecordedCall, Recording
from commengine import CollectiveEvent, Communicator, Stream, UsageError, Work, trace
from commengine.rank_zero import on_every_rank, on_rank_zero
from trainers.tasks.gpt import GPTTrainConfig

COMMAND = "bench.replay"


def parser() -> TrainerCommandParser:
    """The command line; with --record, the other options are pretrain_gpt's."""
    options = new_trainer_parser(COMMAND, __doc__)
    add = options.add_argument
    add("trace", metavar="TRACE", help="the folder of a recording: rank-0.jsonl, rank-1.jsonl, ...")
    add("--record", action="store_true", help="record a training step of pretrain_gpt's options in TRACE")
    add("--overwrite", action="store_true", help="with --record: replace the recording that TRACE holds")
    add(
        "--warmup",
        type=int,
        default=3,
        help="steps before the recorded one, or replays before those that count (default: %(default)s)",
    )
    add("--rounds", type=int, default=7, help="replays, whose median is a collective's time (default: %(default)s)")
    add("--scale", action="store_true", help="replay on fewer ranks than were recorded")
    add_files(options, json="write every collective of every rank")
    return options


# ---- recording


def record(world: Communicator, folder: Path, rest: list[str], warmup: int, *, overwrite: bool = False) -> None:
    """Record a step of pretrain_gpt's options ``rest``, as ``bench.step --save`` does. Collective."""

    def read() -> dict[str, Any]:
        config = recorder.read_traceable(rest, f"python -m {COMMAND} --record", world.size)
        recorder.make_folder(folder, "TRACE", overwrite=overwrite)
        return config.to_json()

    config = GPTTrainConfig(**on_rank_zero(world, read))
    log = recorder.record(world, config, folder, warmup)
    if world.rank == 0:
        print(f"recorded {len(log.events)} collectives a rank on {world.size} ranks in {folder}\n\n{log.summary()}")


# ---- replaying


class Replay:
    """This rank's part of a recording, ready to run any number of times. Making and closing it is collective over
    ``world``.
    """

    def __init__(self, world: Communicator, what: Recording) -> None:
        self.calls = what.calls[world.rank] if world.rank < what.size else ()
        self.comms: list[Communicator | None] = []
        self._streams: dict[tuple[int, int], Stream] = {}
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}
        for index, group in enumerate(what.groups):
            mine = world.rank in group.ranks
            place = group.ranks.index(world.rank) if mine else 0
            comm = world.split(0 if mine else None, place, name=group.name)
            self.comms.append(comm)
            if comm is not None:
                made = [comm.new_stream() for _ in range(what.streams(index))]
                self._streams.update({(index, number): stream for number, stream in enumerate(made, 1)})
        # Enqueue and wait in the order of the step. A collective that the step never waited for ends with the replay.
        moments = [(call.enqueue, 0, number) for number, call in enumerate(self.calls)]
        moments += [
            (call.wait_start, 1, number)
            for number, call in enumerate(self.calls)
            if call.wait_start is not None and call.stream
        ]
        self._moments = sorted(moments)
        # All ranks of a group must make their windows in one order. The order of each stream's calls is common to all.
        order = sorted(range(len(self.calls)), key=lambda number: (self.calls[number].group, self.calls[number].stream))
        prepared = {number: self._prepared(self.calls[number]) for number in order}
        self._runs = [prepared[number] for number in range(len(self.calls))]

    def run(self) -> list[CollectiveEvent]:
        """Run all collectives once. Returns their trace, in the order of ``calls``."""
        works: dict[int, Work] = {}
        mine = [comm for comm in self.comms if comm is not None]
        with trace(*mine) as log:
            for _, waits, number in self._moments:
                if waits:
                    works[number].wait()
                else:
                    works[number] = self._run(number)
            for work in works.values():
                work.wait()
        return log.events

    def close(self) -> None:
        """Free the groups and the windows. No tensor may lie in a window any more."""
        self._runs.clear()
        self._buffers.clear()
        for comm in self.comms:
            if comm is not None:
                comm.close()

    def _run(self, number: int) -> Work:
        name, comm, args, about = self._runs[number]
        work: Work = getattr(comm, name)(*args, **about)
        return work

    def _prepared(self, call: RecordedCall) -> tuple[str, Communicator, tuple[Any, ...], dict[str, Any]]:
        """The method's name, the communicator and the arguments of a call."""
        comm = self.comms[call.group]
        assert comm is not None  # a rank traces only its own groups
        about: dict[str, Any] = {"stream": self._streams[call.group, call.stream]} if call.stream else {}
        if call.redop is not None:
            about["op"] = call.redop
        name, size = call.operation, comm.size
        if name == "barrier":
            return name, comm, (), about
        windows = call.windows or (False, False)
        tensor = self._buffer(call, "", call.shape, windows[name == "reduce_scatter"])
        if name in ("send", "recv"):
            return name, comm, (tensor, call.root), about
        if name == "sendrecv":
            received = self._buffer(replace(call, dtype="uint8"), "received", (call.buffers[1][0],))
            return name, comm, (tensor, call.peers[0], received, call.peers[1]), about
        if call.root is not None:
            about["root"] = call.root
        if name in ("all_reduce", "reduce", "broadcast"):
            return name, comm, (tensor,), about
        if name == "all_to_all":
            return name, comm, (self._buffer(call, "output", call.shape), tensor), about
        rows = call.shape or (1,)
        if name in ("reduce_scatter", "all_gather"):
            part = self._buffer(call, "part", (rows[0] // size, *rows[1:]), windows[name == "all_gather"])
            return name, comm, (part, tensor) if name == "reduce_scatter" else (tensor, part), about
        whole = self._buffer(call, "whole", (rows[0] * size, *rows[1:])) if comm.rank == call.root else None
        return name, comm, (whole, tensor) if name == "gather" else (tensor, whole), about

    def _buffer(self, call: RecordedCall, use: str, shape: tuple[int, ...], in_window: bool = False) -> torch.Tensor:
        """The tensor that all calls of one kind use; the calls of one stream never run at the same time.

        Collective if the tensor lies in a window.
        """
        key = (call.group, call.stream, use, shape, call.dtype, in_window)
        if key not in self._buffers:
            comm, dtype = self.comms[call.group], getattr(torch, call.dtype)
            made = comm.empty(shape, dtype).zero_() if in_window and comm else torch.zeros(shape, dtype=dtype)
            self._buffers[key] = made
        return self._buffers[key]


def check(
    calls: Sequence[RecordedCall], events: Sequence[CollectiveEvent], comms: Sequence[Communicator | None]
) -> None:
    """Raise UsageError unless the replay did what was recorded, call by call."""
    recorded = [
        (call.operation, call.redop, call.root, call.dtype, call.shape, call.bytes, comms[call.group], call.stream > 0)
        for call in calls
    ]
    by_name = {comm.name: comm for comm in comms if comm is not None}
    done = [
        (
            one.operation,
            one.redop,
            one.root,
            one.dtype,
            one.shape,
            one.bytes,
            by_name[one.group],
            one.stream is not None,
        )
        for one in events
    ]
    if recorded != done:
        pairs = zip(recorded, done, strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), (len(recorded), len(done)))
        raise UsageError(f"the replay is not what was recorded: {first[0]} became {first[1]}")


def measure(world: Communicator, what: Recording, warmup: int, rounds: int) -> list[dict[str, Any]]:
    """For each collective of this rank: what was recorded, and its seconds in each replay. Collective."""
    replay = Replay(world, what)
    times: list[list[float]] = [[] for _ in replay.calls]
    for number in range(warmup + rounds):
        world.barrier()
        events = replay.run()
        if number == 0:
            on_every_rank(world, functools.partial(check, replay.calls, events, replay.comms))
        if number >= warmup:
            for spent, event in zip(times, events, strict=True):
                spent.append(event.seconds)
    rows = []
    for call, event, spent in zip(replay.calls, events, times, strict=True):
        group = what.groups[call.group]
        rows.append({
            "operation": call.operation, "group": group.name, "ranks": list(group.ranks), "dtype": call.dtype,
            "redop": call.redop, "root": call.root, "shape": list(call.shape), "bytes": call.bytes,
            "replayed_bytes": event.bytes, "stream": call.stream, "window": any(call.windows),
            "replayed_in_window": any(shared for _, shared in event.buffers), "in_step_s": call.seconds,
            "isolated_s": statistics.median(spent), "replays_s": spent,
        })  # fmt: skip
    replay.close()
    return rows


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
            f"| {1e3 * in_step / many:.3f} | {1e3 * alone / many:.3f} | {_ratio(in_step, alone)} |"
        )
    yield f"| all, a rank | | | | | | | {1e3 * total[0]:.3f} | {1e3 * total[1]:.3f} | {_ratio(total[0], total[1])} |"
    yield from ("", "| group | ranks | bytes recorded | bytes replayed |", "|---|---|---:|---:|")
    moved: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for calls in ranks:
        for call in calls:
            both = moved.setdefault((call["group"], tuple(call["ranks"])), [0, 0])
            both[0] += call["bytes"]
            both[1] += call["replayed_bytes"]
    for (group, members), (recorded, replayed) in moved.items():
        yield f"| {group} | {', '.join(map(str, members))} | {recorded} | {replayed} |"


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other else "-"


def main(world: Communicator, argv: Sequence[str] | None = None) -> None:
    """Record or replay a step, as one rank of the job."""

    def read() -> dict[str, Any]:
        arguments, rest = parser().parse_known_args(argv)
        check_least(arguments, warmup=0, rounds=1)
        if not arguments.record and rest:
            raise ValueError(f"{' '.join(rest)}: unknown; pretrain_gpt's options go with --record")
        if arguments.overwrite and not arguments.record:
            raise ValueError("--overwrite goes with --record")
        check_writable(json=arguments.json, output=arguments.output)
        found: dict[str, Any] = vars(arguments) | {"rest": rest, "surroundings": environment(COMMAND)}
        return found if arguments.record else found | {"data": recording.read(Path(arguments.trace))}

    options = on_rank_zero(world, read)
    if options["record"]:
        record(world, Path(options["trace"]), options["rest"], options["warmup"], overwrite=options["overwrite"])
        return
    what = recording.parse(options["data"])
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
                f"{options['trace']}: no group has two ranks or more left on {world.size}: nothing to replay"
            )
    rows = measure(world, what, options["warmup"], options["rounds"])
    ranks = world.mpi.gather(rows) or []

    def report() -> None:
        lines = [
            f"- recorded on {recorded} ranks, replayed on {world.size}",
            f"- medians of {options['rounds']} replays; per rank, the mean over the ranks that have the group",
            "",
            *tables(ranks),
        ]
        print("\n".join(lines), flush=True)
        if options["output"]:
            text = [*heading("Replay", options["surroundings"]), *lines, ""]
            Path(options["output"]).write_text("\n".join(text))
        if options["json"]:
            result = options["surroundings"] | {"recorded_ranks": recorded, "ranks": ranks}
            Path(options["json"]).write_text(json.dumps(result, indent=1))

    on_rank_zero(world, report)


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
