"""Read the JSON of PyTorch's profiler (Kineto): the NCCL collectives of each rank.

PyTorch notes every call of a process group as an event ``record_param_comms`` with its name, elements, dtype and group,
and the kernel that runs it has the same notes. The host's events give the order, the kernels' the times. Older versions
of PyTorch, and gloo, note only an event ``nccl:NAME`` or ``gloo:NAME`` with the shape of the input, and no group. Such
a trace is read if it has one process group. In a trace with notes such an event comes with a call that has notes, or
at the end of a block of them (``nccl:coalesced``); one that comes with none is a call that is not replayed.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.step_study.recording import Group, require_ranks
from bench.traces import foreign
from bench.traces.foreign import ForeignCall
from bench.traces.opening import begins_with, read_json_object
from commengine import UsageError
from commengine.files.reading import fault_in
from commengine.operations import OPERATIONS

_ANNOTATED = re.compile(r"(nccl|gloo):(\w+)")
_RANK = re.compile(r"rank[_-]?(\d+)|worker[_-]?(\d+)")


def files(paths: Sequence[Path]) -> list[Path]:
    """The files among ``paths`` whose names end as the profiler's do; none, if the first does not begin as they do."""
    found = [path for path in paths if path.name.endswith((".json", ".json.gz"))]
    return found if found and begins_with(found[0], b'"schemaVersion"', b'"traceEvents"') else []


def read(paths: Sequence[Path], left_out: Counter[str]) -> list[list[ForeignCall]]:
    """The calls of each rank, from one file for each. Adds those that are not replayed to ``left_out``.

    Raises UsageError or InputFileError that names the file.
    """
    found: dict[int, _Profile] = {}
    for path in paths:
        profile = _Profile.of(path)
        if profile.rank in found:
            raise UsageError(f"{path}: is of rank {profile.rank}, as {found[profile.rank].path.name} is")
        found[profile.rank] = profile
    size = max([*(profile.world for profile in found.values()), max(found) + 1])
    require_ranks(paths[0].parent, found, size)
    scatters = {number: told for profile in found.values() for number, told in profile.scatters()}
    return [found[rank].calls(size, left_out, scatters) for rank in range(size)]


def _later(one: tuple[float, float, ForeignCall], other: tuple[float, float, ForeignCall]) -> Any:
    """The span that ends last."""
    return max(one, other, key=lambda span: span[1])


def _is_annotation(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "user_annotation" and _ANNOTATED.fullmatch(str(event.get("name"))) is not None


def _kind(event: Mapping[str, Any]) -> str | None:
    return foreign.operation_of(str(event.get("name")).partition(":")[2])


@dataclass(frozen=True)
class _Profile:
    """The file of one rank. world: how many ranks it says there were, or 0. groups: the ranks of groups, by name."""

    path: Path
    rank: int
    world: int
    groups: dict[str, list[int]]
    events: list[dict[str, Any]]

    @classmethod
    def of(cls, path: Path) -> _Profile:
        """Read a file. Raises UsageError or InputFileError that names it."""
        data = read_json_object(path)
        about, events = data.get("distributedInfo", {}), data.get("traceEvents")
        if not isinstance(events, list) or not isinstance(about, dict):
            raise UsageError(f"{path}: not a trace of PyTorch's profiler: it has no list traceEvents")
        rank = about.get("rank")
        if rank is None:
            named = _RANK.search(path.name.lower())
            if named is None:
                raise UsageError(f"{path}: says in distributedInfo of no rank, and its name has none, such as rank0")
            rank = int(named[1] or named[2])
        world, configured = about.get("world_size", 0), about.get("pg_config", [])
        if type(rank) is not int or type(world) is not int or rank < 0 or not isinstance(configured, list):
            raise UsageError(f"{path}: distributedInfo is damaged: rank {str(rank)[:50]} of {str(world)[:50]}")
        named_groups = [one for one in configured if isinstance(one, dict) and "pg_name" in one]
        groups = {str(one["pg_name"]): one["ranks"] for one in named_groups if isinstance(one.get("ranks"), list)}
        complete = [one for one in events if isinstance(one, dict) and one.get("ph") == "X"]
        spans = [one for one in complete if isinstance(one.get("args"), dict)]
        return cls(path, rank, world, groups, spans)

    def scatters(self) -> Iterator[tuple[int, tuple[int, dict[str, Any]]]]:
        """(Number, (this rank, notes)) of the scatters without a group whose input this rank has: it is their root."""
        every = (event for event, _, noted in self._events() if not noted and _kind(event) == "scatter")
        for number, event in enumerate(every):
            if event["args"].get("Input Dims"):
                yield number, (self.rank, event["args"])

    def calls(
        self, size: int, left_out: Counter[str], scatters: Mapping[int, tuple[int, dict[str, Any]]]
    ) -> list[ForeignCall]:
        """The calls of this rank, of ``size``. Counts in ``left_out`` those that are not replayed.

        scatters: those of all ranks' `scatters`. Two calls overlap if the kernel of one of them began before that of
        the other one ended.
        """
        found, numbers = [], itertools.count()
        left_out.update(f"{event['name']} without notes" for event in self._without_notes())
        spans: list[tuple[float, float, ForeignCall]] = []
        for event, kernel, noted in self._events():
            with fault_in(f"{self.path}: the {event.get('name')} at {event.get('ts')} us"):
                if not noted and _kind(event) == "scatter":
                    root, args = scatters.get(next(numbers), (0, event["args"]))
                    made = self._annotated(event | {"args": args}, size, root)
                else:
                    made = self._call(event, kernel, size) if noted else self._annotated(event, size)
            if isinstance(made, str):
                left_out[made] += 1
                continue
            found.append(made)
            if kernel.get("name") != "record_param_comms":
                spans.append((self._start(kernel), self._start(kernel) + 1e6 * made.seconds, made))
        spans.sort(key=lambda span: span[0])
        for longest, (begin, _, call) in zip(itertools.accumulate(spans, _later), spans[1:], strict=False):
            if begin < longest[1]:
                call.overlapped = longest[2].overlapped = True
        return foreign.paired(found)

    def _events(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], bool]]:
        """(event, kernel, whether it has notes) of each call, in order; without a kernel the event stands for it."""
        noted = [one for one in self.events if "Collective name" in one["args"]]
        host = [one for one in noted if one.get("name") == "record_param_comms"]
        device = [one for one in noted if one.get("name") != "record_param_comms"]
        if not noted:
            host = [one for one in self.events if _is_annotation(one)]
            if host and len(self.groups) > 1:
                raise UsageError(
                    f"{self.path}: its events do not say of which of {len(self.groups)} process groups they are; a "
                    "trace of NCCL with a newer PyTorch does"
                )
        kernels = {str(one["args"]["External id"]): one for one in device if "External id" in one["args"]}
        for event in sorted(host or device, key=self._start):
            kernel = kernels.get(str(event["args"].get("External id")), event) if host else event
            yield event, kernel, bool(noted)

    def _without_notes(self) -> Iterator[dict[str, Any]]:
        """The events of calls that have no notes, in a trace in which others have some."""
        notes = [
            one for one in self.events if one.get("name") == "record_param_comms" and "Collective name" in one["args"]
        ]
        alone = 0  # calls with notes since the last event, and without an event of their own: it may end their block
        calls = iter(sorted(notes, key=self._start))
        call = next(calls, None)
        for event in sorted((one for one in self.events if _is_annotation(one)), key=self._start) if notes else ():
            own = False
            while call is not None and self._start(call) <= self._start(event):
                own = self._start(event) <= self._start(call) + float(call.get("dur", 0))
                alone += not own and foreign.operation_of(str(call["args"]["Collective name"])) is not None
                call = next(calls, None)
            if not own and not alone:
                yield event
            alone = 0

    def _start(self, event: Mapping[str, Any]) -> float:
        begun = event.get("ts")
        if isinstance(begun, bool) or not isinstance(begun, int | float):
            raise UsageError(f"{self.path}: the {event.get('name')} has no time (ts)")
        return begun

    def _call(self, event: Mapping[str, Any], kernel: Mapping[str, Any], size: int) -> ForeignCall | str:
        """The call of an event with notes, or the kind of a call that is left out."""
        args = event["args"]
        name = str(args["Collective name"])
        splits = [str(args.get(f"{way} split size", "[]")) for way in ("In", "Out")]
        found = foreign.kind_of(name, args.get("dtype", ""), splits)
        if isinstance(found, str):
            return found
        (kind, dtype), group = found, self._group(args, size)
        ranks, root = group.ranks, None
        if kind in ("send", "recv"):
            peer = int(args["Dst Rank" if kind == "send" else "Src Rank"])
            if peer not in ranks:
                raise ValueError(f"its peer {peer} is no rank of its group {list(ranks)}")
            root = ranks.index(peer)
        elif OPERATIONS[kind].rooted:
            root = int(args.get("Rank", 0))
            root = root if 0 <= root < len(ranks) else 0
        sent, received = (int(args.get(f"{way} msg nelems", 0)) for way in ("In", "Out"))
        elements = foreign.counted_elements(kind, sent, received, len(ranks))
        begun, spent = self._start(kernel), float(kernel.get("dur", 0))
        waited: float | None = 1e-6 * (begun + spent)
        if kind in ("send", "recv") and kernel is event:
            waited = None  # one of several messages, which one kernel carries
        return ForeignCall(
            kind, group, dtype, elements, 1e-6 * self._start(event), waited, 1e-6 * spent,
            redop=foreign.reduction_of(str(kernel.get("name"))), root=root,
        )  # fmt: skip

    def _annotated(self, event: Mapping[str, Any], size: int, root: int = 0) -> ForeignCall | str:
        """The call of an event that has a name and the shape of its input only. root: of one that has a root."""
        args, begun = event["args"], self._start(event)
        name = str(event["name"])
        types, shapes = args.get("Input type"), args.get("Input Dims")
        kind = foreign.operation_of(name.partition(":")[2])
        if kind in (None, "send", "recv"):  # it does not say with whom
            return name
        if kind != "barrier" and not (types and shapes):
            raise ValueError("the shape of its input is not there: profile with record_shapes=True")
        found = foreign.kind_of(name.partition(":")[2], types[0] if types else "")
        if isinstance(found, str):
            return f"{name} of {types[0]}"
        kind, dtype = found
        sent = foreign.elements_of(shapes[0]) if shapes else 0
        elements = foreign.counted_elements(kind, sent, sent, size)
        spent = float(event.get("dur", 0))
        return ForeignCall(
            kind, Group("all ranks", tuple(range(size))), dtype, elements, 1e-6 * begun, 1e-6 * (begun + spent),
            1e-6 * spent, root=root if OPERATIONS[kind].rooted else None,
        )  # fmt: skip

    def _group(self, args: Mapping[str, Any], size: int) -> Group:
        name = str(args.get("Process Group Name", ""))
        described = str(args.get("Process Group Description", ""))
        listed, count = args.get("Process Group Ranks", ""), args.get("Group size", size)
        if isinstance(listed, str):  # PyTorch shortens a long list: "[0, 1, ..., 127]"
            listed = json.loads(listed) if listed.startswith("[") and "..." not in listed else []
        ranks = listed or self.groups.get(name) or (list(range(size)) if count in (size, 0) else [])
        if not ranks:
            raise ValueError(f"the ranks of its group {name!r} of {count} are in neither its notes nor distributedInfo")
        if not all(type(one) is int and 0 <= one < size for one in ranks) or len(set(ranks)) < len(ranks):
            raise ValueError(f"its group has the ranks {str(ranks)[:100]}")
        title = f"{name} ({described})" if described not in ("", "undefined") else f"group {name or '0'}"
        return Group(title, tuple(ranks))
