"""Read a recorded step: the collectives of every rank, one file for each rank in one folder.

`commengine.Trace.save` writes the files. A replay needs the groups that there were, and what each rank did with them,
in order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from commengine import UsageError
from commengine.operations import IN_MEMORY, OPERATIONS
from commengine.trace import FORMAT, SAVED
from trainers.files.reading import InputFileError, read_json_lines

#: the operations that a replay can run; a trace may also have exchanges, whose events do not name their peers
REPLAYED = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier",
    "send", "recv", "sendrecv",
)  # fmt: skip
MESSAGES = tuple(name for name, operation in OPERATIONS.items() if operation.pairwise)
#: the operations that read and write windows
IN_WINDOWS = IN_MEMORY
#: the fields that a file has in another form than a `RecordedCall`
UNLIKE = ("group", "size", "stream", "shape", "peers", "buffers")


#: the types of an event's fields, and which values they may have
FIELDS: dict[str, tuple[Any, Callable[[Any], bool] | None]] = {
    "operation": (str, None), "group": (str, None), "dtype": (str, None), "redop": (str, None), "stream": (str, None),
    "root": (int, lambda rank: rank >= 0), "bytes": (int, lambda size: 0 <= size < 1 << 40),
    **dict.fromkeys(("enqueue", "start", "end", "wait_start", "wait_end"), ((int, float), math.isfinite)),
    "shape": (list, None), "peers": (list, None), "buffers": (list, None),
}  # fmt: skip
MAY_BE_NONE = ("redop", "stream", "root", "wait_start", "wait_end")


@dataclass(frozen=True)
class Group:
    """A group of the recorded run: its name and its ranks there, in the group's order."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RecordedCall:
    """One collective of a rank. group: its index in ``Recording.groups``. stream: its number in the group, 0 for none.

    Times are seconds of the recording rank's clock. For peers and buffers see `commengine.CollectiveEvent`.
    """

    operation: str
    redop: str | None
    root: int | None
    peers: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    buffers: tuple[tuple[int, bool], ...]
    group: int
    stream: int
    enqueue: float
    start: float
    end: float
    wait_start: float | None
    wait_end: float | None

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end - self.start

    @property
    def windows(self) -> tuple[bool, ...]:
        """For each tensor of the call, whether it lies in a window; () if the operation does not use windows."""
        return tuple(shared for _, shared in self.buffers) if self.operation in IN_WINDOWS else ()

    @property
    def sent(self) -> tuple[int, int] | None:
        """(receiving rank, bytes) of a message, or None."""
        to = {"send": self.root, "sendrecv": self.peers[0] if self.peers else None}.get(self.operation)
        return None if to is None else (to, self.bytes)

    @property
    def received(self) -> tuple[int, int] | None:
        """(sending rank, bytes) of a message, or None."""
        if self.operation == "sendrecv":
            return self.peers[1], self.buffers[1][0]
        return (self.root, self.bytes) if self.operation == "recv" and self.root is not None else None


@dataclass(frozen=True)
class Recording:
    """All ranks' collectives. ``calls[rank]`` are in the order in which they were enqueued."""

    groups: tuple[Group, ...]
    calls: tuple[tuple[RecordedCall, ...], ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.calls)

    def streams(self, group: int) -> int:
        """The number of streams that the group needs."""
        return max((call.stream for calls in self.calls for call in calls if call.group == group), default=0)

    def scaled(self, size: int) -> Recording:
        """The parts of the first ``size`` ranks: a group loses its other ranks, and its collectives keep their bytes.

        If a root is gone, the group's first rank becomes the root. Groups of one rank are left out, and so are
        messages from and to ranks that are gone: a send or a recv may be left of a sendrecv. Rows that the group's
        size must divide are rounded up.
        """
        kept = [Group(group.name, tuple(rank for rank in group.ranks if rank < size)) for group in self.groups]
        numbers = {old: new for new, old in enumerate(i for i, group in enumerate(kept) if len(group.ranks) > 1)}
        return Recording(
            tuple(kept[old] for old in numbers),
            tuple(
                tuple(
                    self._scaled(left, kept[call.group], numbers[call.group])
                    for call in calls
                    if call.group in numbers and (left := self._left(call, kept[call.group])) is not None
                )
                for calls in self.calls[:size]
            ),
        )

    def _left(self, call: RecordedCall, kept: Group) -> RecordedCall | None:
        """The part of a call that is left if only the ranks ``kept`` are there: for a sendrecv perhaps one half."""
        old = self.groups[call.group].ranks
        sends, receives = (
            message is not None and old[message[0]] in kept.ranks for message in (call.sent, call.received)
        )
        if call.operation not in MESSAGES or (sends and receives):
            return call
        if call.operation != "sendrecv":
            return call if sends or receives else None
        if sends:
            return replace(call, operation="send", root=call.peers[0], peers=call.peers[:1], buffers=call.buffers[:1])
        if receives:
            nbytes = call.buffers[1][0]
            return replace(
                call, operation="recv", root=call.peers[1], peers=call.peers[1:], buffers=call.buffers[1:],
                bytes=nbytes, dtype="uint8", shape=(nbytes,),
            )  # fmt: skip
        return None

    def _scaled(self, call: RecordedCall, kept: Group, number: int) -> RecordedCall:
        old = self.groups[call.group]
        root, peers = call.root, tuple(kept.ranks.index(old.ranks[peer]) for peer in call.peers)
        if root is not None:
            root = kept.ranks.index(old.ranks[root]) if old.ranks[root] in kept.ranks else 0
        shape, nbytes, size = call.shape, call.bytes, len(kept.ranks)
        if call.operation in ("gather", "scatter"):  # the root's buffer, of one part a rank
            nbytes = nbytes // len(old.ranks) * size
        if call.operation in ("reduce_scatter", "all_gather", "all_to_all") and shape[0] % size:
            rows = -(-shape[0] // size) * size
            nbytes = nbytes // shape[0] * rows
            shape = (rows, *shape[1:])
        return replace(call, group=number, root=root, peers=peers, shape=shape, bytes=nbytes)


def read(folder: Path) -> dict[str, Any]:
    """The files of a recording as one object of JSON types, for `parse`. Raises UsageError that names the fault."""
    paths = sorted(folder.glob("rank-*.jsonl"))
    if not paths:
        raise UsageError(f"{folder}: not a recording: there is no rank-0.jsonl (bench.step --save makes one)")
    found: dict[int, list[Any]] = {}
    for path in paths:
        try:
            lines = read_json_lines(path)
            head = lines[0]
            if head["format"] not in (1, FORMAT):
                raise ValueError(f"format {head['format']}; this version reads 1 and {FORMAT}")
            # Format 1 had no peers of a sendrecv, and did not say which tensors lay in windows.
            events = (
                lines[1:] if head["format"] == FORMAT else [{"peers": [], "buffers": []} | one for one in lines[1:]]
            )
            found[head["rank"]] = [head["groups"], events]
            groups, rank = head["groups"], head["rank"]
            lists = isinstance(groups, dict) and all(isinstance(ranks, list) for ranks in groups.values())
            if not lists or not all(type(one) is int for ranks in (*groups.values(), [rank]) for one in ranks):
                raise TypeError("want the number of its rank, and groups: an object of lists of ranks")
        except InputFileError as error:
            raise UsageError(str(error)) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{path}: not a trace of one rank: {what[:300]}") from error
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise UsageError(f"{folder}: there is no trace of rank {missing[0]}, though of {len(found)} ranks in all")
    return {"folder": str(folder), "ranks": [found[rank] for rank in range(len(found))]}


def parse(data: dict[str, Any]) -> Recording:
    """The recording of these files.

    Raises UsageError if the ranks' traces do not fit together or cannot be replayed.
    """
    try:
        return _parse(data)
    except UsageError as error:
        raise UsageError(f"{data['folder']}: {error}" if "folder" in data else str(error)) from error


def _parse(data: dict[str, Any]) -> Recording:
    numbers: dict[Group, int] = {}
    for groups, _ in data["ranks"]:
        for name, ranks in groups.items():
            numbers.setdefault(Group(name, tuple(ranks)), len(numbers))
    size = len(data["ranks"])
    for group in numbers:
        if gone := [rank for rank in group.ranks if not 0 <= rank < size]:
            raise UsageError(f"group {group.name!r} has rank {gone[0]}, and there are traces of {size} ranks only")
    calls = []
    for rank, (groups, events) in enumerate(data["ranks"]):
        for name, ranks in groups.items():
            if rank not in ranks:
                raise UsageError(f"rank {rank} has a trace of group {name!r}, which is of ranks {ranks}")
        of_rank = {name: numbers[Group(name, tuple(ranks))] for name, ranks in groups.items()}
        calls.append(tuple(_calls(rank, events, of_rank)))
    found = Recording(tuple(numbers), tuple(calls))
    _check_agreement(found)
    return found


def _check_agreement(what: Recording) -> None:
    """Raise UsageError if the ranks of a group did not do the same: a replay would hang where one trace ends early.

    On each stream of a group, the collectives must be the same on all its ranks, and messages must be received as they
    were sent.
    """
    for number, group in enumerate(what.groups):
        for stream in range(what.streams(number) + 1):
            mine = [
                [call for call in what.calls[rank] if (call.group, call.stream) == (number, stream)]
                for rank in group.ranks
            ]
            collectives = [
                [
                    (c.operation, c.redop, c.root, c.dtype, c.bytes, c.windows)
                    for c in calls
                    if c.operation not in MESSAGES
                ]
                for calls in mine
            ]
            for rank, theirs in zip(group.ranks, collectives, strict=True):
                if theirs != collectives[0]:
                    _disagree(group, (group.ranks[0], collectives[0]), (rank, theirs))
            sent, received = (
                {
                    (one, other): [about[1] for about in map(which, mine[one]) if about and about[0] == other]
                    for one in range(len(mine))
                    for other in range(len(mine))
                }
                for which in (operator.attrgetter("sent"), operator.attrgetter("received"))
            )
            for (one, other), sizes in sent.items():
                if received[other, one] != sizes:
                    _disagree(group, (group.ranks[one], sizes), (group.ranks[other], received[other, one]))


def _disagree(group: Group, one: tuple[int, list[Any]], other: tuple[int, list[Any]]) -> NoReturn:
    (first, theirs), (second, others) = one, other
    at = next((k for k, pair in enumerate(zip(theirs, others, strict=False)) if pair[0] != pair[1]), None)
    what = f"{len(theirs)} and {len(others)} calls" if at is None else f"call {at}: {theirs[at]} and {others[at]}"
    raise UsageError(f"the traces do not fit: ranks {first} and {second} of group {group.name!r} disagree: {what}")


def _calls(rank: int, events: list[Any], groups: dict[str, int]) -> Iterator[RecordedCall]:
    for number, event in enumerate(events):
        where = f"rank {rank}, event {number}"
        if not isinstance(event, dict) or (missing := [name for name in SAVED if name not in event]):
            raise UsageError(f"{where}: not an event{f': {missing[0]} is missing' if isinstance(event, dict) else ''}")
        for name, (kinds, valid) in FIELDS.items():
            value = event[name]
            fits = isinstance(value, kinds) and not isinstance(value, bool) and (valid is None or valid(value))
            if not fits and not (value is None and name in MAY_BE_NONE):
                raise UsageError(f"{where}: {name} is {str(value)[:100]}")
        if event["operation"] not in REPLAYED:
            why = "a trace does not say with which ranks it was" if event["operation"] == "exchange" else "unknown"
            raise UsageError(f"{where}: {event['operation']} cannot be replayed: {why}")
        if event["operation"] == "sendrecv" and not event["peers"]:
            raise UsageError(
                f"{where}: a trace of format 1 does not say with which ranks a sendrecv was: record it again"
            )
        if event["group"] not in groups:
            raise UsageError(f"{where}: group {event['group']!r} is not among {', '.join(groups)}")
        stream = event["stream"]
        fields = {name: event[name] for name in SAVED if name not in UNLIKE}
        try:
            index = 0 if stream is None else int(stream.rpartition("/stream")[2])
            shape = tuple(operator.index(n) for n in event["shape"])
            if event["operation"] != "barrier" and not isinstance(getattr(torch, event["dtype"], None), torch.dtype):
                raise ValueError(f"dtype {event['dtype']!r} is none of torch's")
            peers = tuple(operator.index(rank) for rank in event["peers"])
            buffers = tuple((operator.index(size), bool(shared)) for size, shared in event["buffers"])
            if event["operation"] == "sendrecv" and (len(peers), len(buffers)) != (2, 2):
                raise ValueError("a sendrecv has two peers and two buffers")
            yield RecordedCall(
                **fields, shape=shape, peers=peers, buffers=buffers, group=groups[event["group"]], stream=index
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{where}: {error}") from error
