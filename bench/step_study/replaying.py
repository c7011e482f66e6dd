"""Run the collectives of a recording again, and measure each of them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.step_study.recording import RecordedCall, Recording
from commengine import CollectiveEvent, Communicator, Stream, UsageError, Work, trace
from commengine.rank_zero import on_every_rank


class Replay:
    """This rank's part of a recording, ready to run any number of times.

    Making and closing it is collective over ``world``.
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
        if name not in ("gather", "scatter"):
            raise UsageError(f"{name} cannot be replayed: it is not known how to make its arguments")
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
