"""Run the collectives of a recording again, and measure each of them."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.step_study.recording import RecordedCall, Recording, moments
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
                # A pipeline stage begins a receive, and sends before it comes: no message may wait for another one.
                for number in range(1, 1 + what.streams(index)):
                    threaded = comm.device.type != "cpu" or not what.only_messages(index, number)
                    self._streams[index, number] = comm.new_stream(threaded=threaded)
        # Enqueue and wait in the order of the step. A collective that the step never waited for ends with the replay.
        self._moments = moments(self.calls)
        # All ranks of a group must make their windows in one order. The order of each stream's calls is common to all.
        order = sorted(range(len(self.calls)), key=lambda number: (self.calls[number].group, self.calls[number].stream))
        prepared = {number: self._prepared(number) for number in order}
        self._runs = [prepared[number] for number in range(len(self.calls))]

    def run(self) -> list[CollectiveEvent]:
        """Run all collectives once. Returns their trace, in the order of ``calls``."""
        works: dict[int, Work] = {}
        mine = [comm for comm in self.comms if comm is not None]
        with trace(*mine) as log:
            for waits, number in self._moments:
                if waits:
                    works[number].wait()
                else:
                    works[number] = self._runs[number]()
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

    def _prepared(self, number: int) -> Callable[[], Work]:
        """The call of the communicator's method."""
        call = self.calls[number]
        comm, name = self.comms[call.group], call.operation
        assert comm is not None  # a rank traces only its own groups
        stream = self._streams[call.group, call.stream] if call.stream else None
        if name == "barrier":
            return partial(comm.barrier, stream=stream)
        root, op, rows = call.root, call.redop or "sum", call.shape or (1,)
        windows = call.windows or (False, False)
        use = f"received {number}" if name == "recv" else ""  # several receives of a stream may be under way
        tensor = self._buffer(call, use, call.shape, windows[name == "reduce_scatter"])
        other = None
        if name in ("reduce_scatter", "all_gather"):
            other = self._buffer(call, "part", (rows[0] // comm.size, *rows[1:]), windows[name == "all_gather"])
        elif name == "all_to_all":
            other = self._buffer(call, "output", call.shape)
        elif name in ("all_to_all_v", "all_gather_v"):
            given = sum(call.rows[0]) if name == "all_to_all_v" else call.rows[0][comm.rank]
            other = self._buffer(call, "rows", (given, *rows[1:]))
        elif name in ("gather", "scatter") and comm.rank == root:
            other = self._buffer(call, "whole", (rows[0] * comm.size, *rows[1:]))
        elif name == "sendrecv":
            # The recording names the dtype of what was sent; a message of another one would be an error.
            other = self._buffer(call, "received", (call.buffers[1][0] // tensor.itemsize,))
        arguments: dict[str, tuple[Any, ...]] = {
            "all_reduce": (tensor, op), "reduce": (tensor, root, op), "reduce_scatter": (other, tensor, op),
            "all_gather": (tensor, other), "broadcast": (tensor, root), "gather": (other, tensor, root),
            "scatter": (tensor, other, root), "all_to_all": (other, tensor), "send": (tensor, root),
            "recv": (tensor, root), "all_to_all_v": (other, tensor, *call.rows),
            "all_gather_v": (tensor, other, *call.rows), "sendrecv": (tensor, *call.peers[:1], other, *call.peers[1:]),
        }  # fmt: skip
        return partial(getattr(comm, name), *arguments[name], stream=stream)

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


def check(calls: Sequence[RecordedCall], events: Sequence[CollectiveEvent]) -> None:
    """Raise UsageError unless the replay did what was recorded, call by call."""
    common = operator.attrgetter("operation", "redop", "root", "dtype", "shape", "bytes")
    for call, event in zip(calls, events, strict=True):
        recorded, done = (*common(call), call.stream > 0), (*common(event), event.stream is not None)
        if recorded != done:
            raise UsageError(f"the replay is not what was recorded: {recorded} became {done}")


def measure(world: Communicator, what: Recording, warmup: int, rounds: int) -> list[dict[str, Any]]:
    """For each collective of this rank: what was recorded, and its seconds in each replay. Collective."""
    replay = Replay(world, what)
    times: list[list[float]] = [[] for _ in replay.calls]
    for number in range(warmup + rounds):
        world.barrier()
        events = replay.run()
        if number == 0:
            on_every_rank(world, partial(check, replay.calls, events))
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
