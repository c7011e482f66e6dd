"""Read a recorded step: the collectives of every rank, one file for each rank in one folder.

`commengine.Trace.save` writes the files. A replay needs the groups that there were, and what each rank did with them,
in order.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from commengine import CollectiveEvent, UsageError
from commengine.files.reading import fault_in, read_json_lines
from commengine.files.schema import FilePart, checked, told
from commengine.operations import IN_MEMORY, OPERATIONS
from commengine.trace import FORMAT

#: the operations that a replay can run; a trace may also have exchanges, whose events do not name their peers
REPLAYED = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all",
    "all_to_all_v", "all_gather_v", "barrier", "send", "recv", "sendrecv",
)  # fmt: skip
MESSAGES = tuple(name for name, operation in OPERATIONS.items() if operation.pairwise)
_Rank = Annotated[int, Field(ge=0)]


class _Head(FilePart):
    """The first line of a rank's file. groups: the world ranks of each group."""

    model_config = ConfigDict(extra="ignore")

    format: int
    rank: _Rank
    groups: dict[str, list[int]]


@dataclass(frozen=True)
class Group:
    """A group of the recorded run: its name and its ranks there, in the group's order."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RecordedCall:
    """One collective of a rank. group: its index in ``Recording.groups``. stream: its number in the group, 0 for none.

    Times are seconds of the recording rank's clock. For peers, buffers and rows see `commengine.CollectiveEvent`.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    operation: str
    redop: str | None
    root: _Rank | None
    peers: tuple[_Rank, ...]
    dtype: str
    shape: tuple[int, ...]
    bytes: Annotated[int, Field(ge=0, lt=1 << 40)]
    buffers: tuple[tuple[int, bool], ...]
    group: int
    stream: int
    enqueue: float
    start: float
    end: float
    wait_start: float | None
    wait_end: float | None
    rows: tuple[tuple[_Rank, ...], ...] = ()

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end - self.start

    @property
    def windows(self) -> tuple[bool, ...]:
        """For each tensor of the call, whether it lies in a window; () if the operation does not use windows."""
        return tuple(shared for _, shared in self.buffers) if self.operation in IN_MEMORY else ()

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


_CALL = TypeAdapter(RecordedCall)


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

    def only_messages(self, group: int, stream: int) -> bool:
        """Whether a stream of the group has messages and nothing else, on every rank."""
        mine = (call for calls in self.calls for call in calls if (call.group, call.stream) == (group, stream))
        return all(call.operation in MESSAGES for call in mine)

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
        if call.operation != "sendrecv" or not (sends or receives):
            return call if sends or receives else None
        if sends:
            return replace(call, operation="send", root=call.peers[0], peers=call.peers[:1], buffers=call.buffers[:1])
        nbytes = call.buffers[1][0]
        return replace(
            call, operation="recv", root=call.peers[1], peers=call.peers[1:], buffers=call.buffers[1:],
            bytes=nbytes, shape=(nbytes // getattr(torch, call.dtype).itemsize,),
        )  # fmt: skip

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
        left = tuple(
            tuple(count for count, rank in zip(of, old.ranks, strict=True) if rank in kept.ranks) for of in call.rows
        )
        if left:  # the rows for and from ranks that are gone go, too
            shape = (sum(left[-1]), *shape[1:])
            nbytes = nbytes // call.shape[0] * shape[0] if call.shape[0] else 0
        return replace(call, group=number, root=root, peers=peers, shape=shape, bytes=nbytes, rows=left)


def moments(calls: Sequence[RecordedCall | CollectiveEvent]) -> list[tuple[bool, int]]:
    """What a rank's caller does, in order: (False, number) enqueues a call, (True, number) waits for a stream's."""
    found = [(call.enqueue, False, number) for number, call in enumerate(calls)]
    waits = ((call.wait_start, number) for number, call in enumerate(calls) if call.stream)
    found += [(moment, True, number) for moment, number in waits if moment is not None]
    return [(waits, number) for _, waits, number in sorted(found)]


def require_ranks(folder: Path, found: Collection[int], size: int = 0) -> None:
    """Raise UsageError that names the first rank without a trace. size: of the run, where the traces say it."""
    missing = sorted(set(range(max(size, len(found)))) - set(found))
    if missing:
        raise UsageError(f"{folder}: there are traces of {len(found)} ranks, and none of rank {missing[0]}")


def read(folder: Path) -> dict[str, Any]:
    """The files of a recording as one object of JSON types, for `parse`. Raises UsageError that names the fault."""
    paths = sorted(folder.glob("rank-*.jsonl"))
    if not paths:
        raise UsageError(f"{folder}: not a recording: there is no rank-0.jsonl (bench.step --save makes one)")
    found: dict[int, list[Any]] = {}
    for path in paths:
        with fault_in(f"{path}: not a trace of one rank", 300):
            lines = read_json_lines(path)
            if not lines:
                raise ValueError("the file is empty")
            if lines[0]["format"] not in (1, FORMAT):
                raise ValueError(f"format {lines[0]['format']}; this version reads 1 and {FORMAT}")
            head = checked(_Head, lines[0])
            # Format 1 had no peers of a sendrecv, and did not say which tensors lay in windows.
            older: dict[str, Any] = {"peers": [], "buffers": []} if head.format == 1 else {}
            found[head.rank] = [head.groups, [older | event for event in lines[1:]]]
    require_ranks(folder, found)
    return {"folder": str(folder), "ranks": [found[rank] for rank in range(len(found))]}


def parse(data: dict[str, Any]) -> Recording:
    """The recording of these files.

    Raises UsageError if the ranks' traces do not fit together or cannot be replayed.
    """
    with fault_in(data["folder"], 500):
        numbers: dict[Group, int] = {}
        for groups, _ in data["ranks"]:
            for name, ranks in groups.items():
                numbers.setdefault(Group(name, tuple(ranks)), len(numbers))
        size = len(data["ranks"])
        for group in numbers:
            if gone := [rank for rank in group.ranks if not 0 <= rank < size]:
                raise ValueError(f"group {group.name!r} has rank {gone[0]}, and there are traces of {size} ranks only")
        calls = []
        for rank, (groups, events) in enumerate(data["ranks"]):
            for name, ranks in groups.items():
                if rank not in ranks:
                    raise ValueError(f"rank {rank} has a trace of group {name!r}, which is of ranks {ranks}")
            of_rank = {name: numbers[Group(name, tuple(ranks))] for name, ranks in groups.items()}
            calls.append(tuple(_calls(f"{data['folder']}: rank {rank}", events, of_rank)))
        found = Recording(tuple(numbers), tuple(calls))
        _check_agreement(found)
    return found


def _check_agreement(what: Recording) -> None:
    """Raise ValueError if the ranks of a group did not do the same: a replay would hang where one trace ends early.

    On each stream of a group, the collectives must be the same on all its ranks, and messages must be received as they
    were sent.
    """
    said: defaultdict[tuple[bool, int, int, tuple[int, ...]], defaultdict[int, list[Any]]]
    said = defaultdict(lambda: defaultdict(list))  # by group, stream and ranks in it, for each of these ranks
    for rank, calls in enumerate(what.calls):
        for call in calls:
            message, ranks = call.operation in MESSAGES, what.groups[call.group].ranks
            me = ranks.index(rank)
            if not message:
                uneven = OPERATIONS[call.operation].uneven
                about = (call.operation, call.redop, call.root, call.dtype, 0 if uneven else call.bytes, call.windows)
                said[message, call.group, call.stream, tuple(range(len(ranks)))][me].append(about)
            if call.sent is not None:
                said[message, call.group, call.stream, (me, call.sent[0])][0].append(call.sent[1])
            if call.received is not None:
                said[message, call.group, call.stream, (call.received[0], me)][1].append(call.received[1])
    for (_, number, _, parties), lists in said.items():
        group, first = what.groups[number], lists[0]
        for place, party in enumerate(parties):
            if (other := lists[place]) != first:
                at = next((k for k, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), None)
                counts = f"{len(first)} and {len(other)} calls"
                raise ValueError(
                    f"the traces do not fit: ranks {group.ranks[parties[0]]} and {group.ranks[party]} of group "
                    f"{group.name!r} disagree: {counts if at is None else f'call {at}: {first[at]} and {other[at]}'}"
                )


def _check_rows(call: RecordedCall) -> None:
    """Raise ValueError unless the numbers of rows are those of the call."""
    at = 1 if call.operation == "all_to_all_v" else 0  # of the tensor that is counted
    if len(call.rows) != at + 1 or not call.shape or sum(call.rows[at]) != call.shape[0]:
        raise ValueError(f"{call.operation} of {list(call.shape)} has rows {[list(one) for one in call.rows]}")


def _check_times(call: RecordedCall) -> None:
    """Raise ValueError if a time of the call is before one that it follows."""
    for first, then in (("enqueue", "end"), ("start", "end"), ("wait_start", "wait_end")):
        before, after = getattr(call, first), getattr(call, then)
        if before is not None and after is not None and after < before:
            raise ValueError(f"{call.operation}: its {then} {after} is before its {first} {before}")


def _calls(where: str, events: list[Any], groups: dict[str, int]) -> Iterator[RecordedCall]:
    for number, data in enumerate(events):
        with fault_in(f"{where}, event {number}"):
            name, stream = data.get("group"), data.get("stream")
            if name not in groups:
                raise ValueError(f"group {name!r} is not among {', '.join(groups)}")
            numbers = {"group": groups[name], "stream": 0 if stream is None else int(stream.rpartition("/stream")[2])}
            try:
                call = _CALL.validate_json(json.dumps(data | numbers))  # of JSON, so that a list may be a tuple
            except ValidationError as error:
                raise ValueError(told(error)) from None
            if call.operation not in REPLAYED:
                why = "a trace does not say with which ranks it was" if call.operation == "exchange" else "unknown"
                raise ValueError(f"{call.operation} cannot be replayed: {why}")
            if call.operation == "sendrecv" and (len(call.peers), len(call.buffers)) != (2, 2):
                raise ValueError("a sendrecv has two peers and two buffers; record a trace of format 1 again")
            if OPERATIONS.get(call.operation) and OPERATIONS[call.operation].uneven:
                _check_rows(call)
            if call.operation != "barrier" and not isinstance(getattr(torch, call.dtype, None), torch.dtype):
                raise ValueError(f"dtype {call.dtype!r} is none of torch's")
            _check_times(call)
            yield call
