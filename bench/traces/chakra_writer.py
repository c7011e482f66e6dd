"""Write a recorded step as a Chakra execution trace: PREFIX.RANK.et for each rank, and the groups for ASTRA-sim.

The caller of a rank is a chain of nodes: its collectives and, between them, COMP_NODEs of as many microseconds as it
spent. A collective on a stream comes after the node before it and after the last one of its stream; the node in which
the caller goes on after waiting comes after that collective. ASTRA-sim follows data_deps, so these are in data_deps.
"""

from __future__ import annotations

import json
import math
from typing import Any

from bench.step_study.recording import moments
from bench.traces import chakra_schema
from bench.traces.chakra_schema import COLLECTIVES, NODES, attribute
from bench.traces.foreign import Written
from commengine import CollectiveEvent, UsageError

#: the file of the groups: ASTRA-sim's --comm-group-configuration. Its name has no "empty", which ASTRA-sim looks for
GROUPS = "comm_groups.json"
#: the version of the schema that the metadata names
VERSION = "1.0.0"
#: the metadata's attribute with the names and ranks of the groups, as JSON
GROUP_NAMES = "process_groups"
#: the kinds of nodes of messages; all other operations are collectives
_KINDS = {"send": "COMM_SEND_NODE", "recv": "COMM_RECV_NODE", "sendrecv": "COMM_SEND_NODE"}
#: times that an event may lack, in the attribute "times"
TIMES = ("enqueue", "start", "end", "wait_start", "wait_end")


def comm_size(operation: str, nbytes: int, size: int) -> int:
    """The bytes of a rank's input, which Chakra and ASTRA-sim count, from the bytes of a call as nccl-tests counts."""
    return nbytes // size if operation in ("all_gather", "gather") else nbytes


def call_bytes(operation: str, comm_bytes: int, size: int) -> int:
    """The bytes of a call as nccl-tests counts them: the inverse of `comm_size`."""
    return comm_bytes * size if operation in ("all_gather", "gather") else comm_bytes


def write_rank(one: Written) -> None:
    """Write one rank's file; rank 0 writes the ranks of each group of two or more by its number, too.

    Raises UsageError for an operation that Chakra cannot name.
    """
    names = {one.number(name): {"name": name, "ranks": list(ranks)} for name, ranks in one.groups.items()}
    metadata = chakra_schema.message_types()["GlobalMetadata"](version=VERSION)
    metadata.attr.append(attribute("writer", "string_val", "commengine"))
    metadata.attr.append(attribute(GROUP_NAMES, "string_val", json.dumps(names)))
    chakra_schema.write_messages(one.path, metadata, _Step(one).nodes())
    if one.rank == 0:
        ranks = {str(number): list(members) for (_, members), number in one.numbers.items() if len(members) > 1}
        one.path.with_name(GROUPS).write_text(json.dumps(ranks, indent=1) + "\n", encoding="utf-8")


class _Step:
    """The nodes of a rank's step."""

    def __init__(self, written: Written) -> None:
        self._written = written
        self._node = chakra_schema.message_types()["Node"]
        self._made: list[Any] = []
        self._before: set[int] = set()  # the nodes that the caller's next one comes after
        self._streams: dict[str, tuple[int, ...]] = {}  # the last nodes of each stream
        self._zero = 0.0

    def nodes(self) -> list[Any]:
        """All nodes, in the order of their numbers."""
        events, span = self._written.trace.events, self._written.span
        clock = span[0] if span else min((event.enqueue for event in events), default=0.0)
        self._zero = clock
        ends: dict[int, tuple[int, ...]] = {}
        for waits, number in moments(events):
            event = events[number]
            moment = event.enqueue if not waits or event.wait_start is None else event.wait_start
            self._compute(clock, moment)
            if waits:
                self._before.update(ends[number])
                clock = max(moment, event.wait_end or moment)
            else:
                ends[number] = self._call(event)
                clock = moment if event.stream is not None else max(moment, event.end)
        if span:
            self._compute(clock, span[1])
        return self._made

    def _micros(self, moment: float) -> int:
        """Microseconds since the step began. Durations are differences of these, so they add up to the step's."""
        return max(0, round(1e6 * (moment - self._zero)))

    def _compute(self, begin: float, end: float) -> None:
        spent = self._micros(end) - self._micros(begin)
        if spent > 0:
            self._before = {self._add("COMP_NODE", "compute", begin, spent).id}

    def _add(self, kind: str, name: str, begin: float, micros: int, *after: int) -> Any:
        before = sorted(self._before.union(after))
        node = self._node(
            id=len(self._made) + 1, name=name, type=NODES.index(kind), data_deps=before,
            start_time_micros=self._micros(begin), duration_micros=micros,
        )  # fmt: skip
        node.attr.append(attribute("is_cpu_op", "bool_val", False))  # else ASTRA-sim refuses to communicate
        self._made.append(node)
        return node

    def _call(self, event: CollectiveEvent) -> tuple[int, ...]:
        """Add the nodes of a collective or a message. Returns the numbers of those that end it."""
        kind = _KINDS.get(event.operation, "COMM_COLL_NODE")
        if kind == "COMM_COLL_NODE" and event.operation not in COLLECTIVES:
            raise UsageError(f"{event.operation} of group {event.group!r}: Chakra has no name for it")
        if event.size == 1:
            kind = "COMP_NODE"  # it reaches no other rank, and ASTRA-sim needs two
        after = self._streams.get(event.stream or "", ())
        spent = self._micros(event.end) - self._micros(event.start)
        name = f"{event.operation} {event.group}"
        node = self._add(kind, name, event.start, spent, *after)
        self._describe(node, event, kind)
        made = [node]
        if event.operation == "sendrecv" and event.size > 1:
            made.append(self._add("COMM_RECV_NODE", name, event.start, spent, *after))
            self._message(made[1], event, "COMM_RECV_NODE", event.buffers[1][0])
            made[1].attr.append(attribute("of_send", "uint64_val", node.id))
        ends = tuple(one.id for one in made)
        if event.stream is None:
            self._before = set(ends)
        else:
            self._streams[event.stream] = ends
        return ends

    def _describe(self, node: Any, event: CollectiveEvent, kind: str) -> None:
        """The attributes that Chakra names, and those that a replay of ours needs besides."""
        counted = comm_size(event.operation, event.bytes, event.size)
        if kind in ("COMM_SEND_NODE", "COMM_RECV_NODE"):
            self._message(node, event, kind, counted)
        else:
            if event.operation in COLLECTIVES:
                node.attr.append(attribute("comm_type", "int64_val", COLLECTIVES.index(event.operation)))
            node.attr.append(attribute("comm_size", "int64_val", counted))
            node.attr.append(attribute("pg_name", "string_val", self._written.number(event.group)))
        times = [getattr(event, name) for name in TIMES]
        more: list[tuple[str, str, Any]] = [
            ("operation", "string_val", event.operation), ("dtype", "string_val", event.dtype),
            ("shape", "int64_list", event.shape),
            ("times", "double_list", [math.nan if time is None else time for time in times]),
            ("buffer_bytes", "int64_list", [size for size, _ in event.buffers]),
            ("in_window", "bool_list", [shared for _, shared in event.buffers]),
            ("redop", "string_val", event.redop), ("root", "int32_val", event.root),
            ("stream", "string_val", event.stream), ("peers", "int32_list", event.peers or None),
        ]  # fmt: skip
        node.attr.extend(attribute(*one) for one in more if one[2] is not None)

    def _message(self, node: Any, event: CollectiveEvent, kind: str, nbytes: int) -> None:
        ranks = self._written.groups[event.group]
        sends = kind == "COMM_SEND_NODE"
        peer = event.peers[0 if sends else -1]
        node.attr.extend([
            attribute("comm_dst" if sends else "comm_src", "int32_val", ranks[peer]),
            attribute("comm_size", "int64_val", nbytes), attribute("comm_tag", "int32_val", 0),
            attribute("pg_name", "string_val", self._written.number(event.group)),
        ])  # fmt: skip
