"""PyTorch's execution traces in JSON, which PARAM replays: rank-0.json, rank-1.json, ...

PyTorch's ExecutionTraceObserver writes such traces; MLCommons calls them Chakra host traces. Each call of a process
group is a node ``record_param_comms`` with its name, elements, dtype and group, and each wait for one is such a node,
too. There are no times, so a replay has nothing to compare its own with, and no reductions other than sums.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.step_study.recording import Group, moments, require_ranks
from bench.traces import foreign
from bench.traces.foreign import ForeignCall, Written, ranks_of
from bench.traces.opening import begins_with, read_json_object
from commengine import CollectiveEvent, UsageError
from commengine.files.schema import fault_in
from commengine.operations import OPERATIONS

#: the version of the format that is written, and the parts of its name that are read: before 1.0.3 groups had no names
SCHEMA, OLDEST = "1.1.0-chakra.0.0.4", (1, 0, 3)
#: our operations by PyTorch's names for them; the others have the same names
_NAMES = {
    "all_reduce": "allreduce", "all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_allv", "all_to_all_v": "all_to_allv",
}  # fmt: skip
_DTYPES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble", "none": "Byte",
}  # fmt: skip
_FILE = re.compile(r"(?:.*[^0-9])?(\d+)\.json(?:\.gz)?")
_CALL, _GROUPS = "record_param_comms", "## process_group:init ##"
_KINDS = {str: "string", int: "uint64"}


# ---- reading


def files(paths: Sequence[Path]) -> list[Path]:
    """The files among ``paths`` that have the name of a rank, such as rank-0.json, in the order of the ranks."""
    found = [path for _, path in sorted((_rank_of(path), path) for path in paths if _FILE.fullmatch(path.name))]
    return found if found and begins_with(found[0], b'"schema"') else []


def _rank_of(path: Path) -> int:
    return int(_FILE.sub(r"\1", path.name))


def read(paths: Sequence[Path], left_out: Counter[str]) -> list[list[ForeignCall]]:
    """The calls of each rank, from one file for each. Adds those that are not replayed to ``left_out``.

    Raises UsageError or InputFileError that names the file.
    """
    require_ranks(paths[0].parent, [_rank_of(path) for path in paths])
    return [foreign.marked(foreign.paired(list(_rank(path, len(paths), left_out)))) for path in paths]


def _rank(path: Path, size: int, left_out: Counter[str]) -> Iterator[ForeignCall]:
    data = read_json_object(path)
    schema, nodes = str(data.get("schema", "")), data.get("nodes")
    version = tuple(int(part) for part in re.findall(r"\d+", schema.partition("-")[0]))
    if not isinstance(nodes, list) or version < OLDEST:
        raise UsageError(f"{path}: not an execution trace of version 1.0.3 or newer: its schema is {schema[:50]!r}")
    groups: dict[str, Group] = {}
    found: list[tuple[int, str, dict[str, Any], list[Any]]] = []
    number: Any = "?"
    with fault_in(lambda: f"{path}: node {number}"):
        for node in nodes:
            number = node["id"]
            name = str(node["name"])
            if "process_group:init" in name:
                groups |= _groups_in(node, size)
            elif name == _CALL:
                about = {one["name"]: one["value"] for one in node["attrs"]}
                found.append((int(node["id"]), str(about["collective_name"]), about, node["inputs"]["values"]))
        found.sort(key=lambda call: call[0])
        waits = {_request(call): call[0] for call in found if call[1] == "wait"}
        for call in found:
            number, name, about, _ = call
            made = _call(call, groups) if name != "wait" else None
            if isinstance(made, ForeignCall):
                group, request = _request(call)  # an older version does not say the group of a wait
                waited = waits.get((group, request), waits.get(("", request)))
                made.waited = number + 0.5 if waited is None else float(waited)  # without a wait the call itself waits
                yield made
            elif made is not None:
                left_out[made] += 1


def _groups_in(node: Mapping[str, Any], size: int) -> dict[str, Group]:
    found = {}
    for one in json.loads(node["inputs"]["values"][0]):
        name, described = str(one["pg_name"]), str(one.get("pg_desc", ""))
        title = described if described not in ("", "undefined", "default_pg") else f"group {name}"
        found[name] = Group(title, ranks_of(one["ranks"]) if one["ranks"] else tuple(range(size)))
    return found


def _arguments(values: list[Any]) -> list[Any]:
    """The values of a node from its request on: before it is the input, if there is one."""
    first = values[0]
    request = isinstance(first, int) or (len(first) == 2 and isinstance(first[0], int) and isinstance(first[1], bool))
    return values if request else values[1:]


def _request(call: tuple[int, str, dict[str, Any], list[Any]]) -> tuple[str, str]:
    """The group of a call, and its number there, which the wait for it has, too."""
    return str(call[2].get("pg_name", "")), json.dumps(_arguments(call[3])[0])


def _call(call: tuple[int, str, dict[str, Any], list[Any]], groups: Mapping[str, Group]) -> ForeignCall | str:
    """The call of a node, or its kind if it is left out."""
    number, name, about, values = call
    splits = [str(about.get(f"{way}_split_size", "[]")) for way in ("in", "out")]
    found = foreign.kind_of(name, about.get("dtype", ""), splits)
    if isinstance(found, str):
        return found
    kind, dtype = found
    group = groups.get(str(about.get("pg_name", "0")))
    if group is None:
        raise ValueError(f"the ranks of its group {about.get('pg_name')!r} are not known")
    root = int(_arguments(values)[2]) if OPERATIONS[kind].pairwise or OPERATIONS[kind].rooted else None
    sent, received = (int(about.get(f"{way}_msg_nelems", 0)) for way in ("in", "out"))
    elements = foreign.counted_elements(kind, sent, received, len(group.ranks))
    return ForeignCall(kind, group, dtype, elements, float(number), None, 0.0, root=root)


# ---- writing


def write_rank(one: Written) -> None:
    """Write one rank's file."""
    written, events = _Nodes(one), one.trace.events
    for waits, number in moments(events):
        (written.wait if waits else written.call)(events[number], number)
    head = {
        "schema": SCHEMA, "pid": one.rank + 1, "time": dt.datetime.now().strftime("%Y-%m-%d %H:%M:%S"), "start_ts": 0,
        "finish_ts": 0, "nodes": written.nodes,
    }  # fmt: skip
    one.path.write_text(json.dumps(head), encoding="utf-8")


class _Nodes:
    """The nodes of a rank's file."""

    def __init__(self, one: Written) -> None:
        self._written = one
        self.nodes: list[dict[str, Any]] = []
        self._add("[pytorch|profiler|execution_trace|process]", 1)
        self._add("[pytorch|profiler|execution_trace|thread]", 1)
        everyone = {"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": one.size}
        config = [everyone] + [
            {"pg_name": str(number), "pg_desc": name, "ranks": list(ranks), "group_size": len(ranks)}
            for (name, ranks), number in one.numbers.items()
        ]
        for group in config:
            group |= {"backend_config": "cpu:mpi", "group_count": len(config)}
        self._add(_GROUPS, 2, [json.dumps(config)], ["String"])

    def call(self, event: CollectiveEvent, request: int) -> None:
        """Add a collective or a message; a sendrecv is two messages."""
        width = foreign.item_bytes(event.dtype) if event.dtype != "none" else 1
        if event.operation == "sendrecv":
            received = event.buffers[1][0] // width
            self._note("send", event, [2 * request, True], event.peers[0], event.elements, event.elements)
            self._note("recv", event, [2 * request + 1, True], event.peers[1], received, received)
            return
        if event.operation == "all_gather_v":
            raise UsageError(f"{event.operation} of group {event.group!r}: these traces have no name for it")
        size, count = event.size, event.elements
        sent, received = {
            "all_gather": (count // size, count), "reduce_scatter": (count, count // size),
            "gather": (count, count * size), "scatter": (count * size, count),
        }.get(event.operation, (count, count))  # fmt: skip
        splits = ["[]", "[]"]
        if event.operation == "all_to_all_v":  # in elements: (sent, received)
            width = math.prod(event.shape[1:])
            splits = [json.dumps([rows * width for rows in of]) for of in reversed(event.rows)]
            received = sum(event.rows[0]) * width
        message = event.operation in ("send", "recv")
        place = self._written.groups[event.group].index(self._written.rank)
        root = place if event.root is None else event.root
        name = _NAMES.get(event.operation, event.operation)
        self._note(name, event, [2 * request, message], root, sent, received, splits)

    def wait(self, event: CollectiveEvent, request: int) -> None:
        """Add the wait for a call on a stream."""
        pairs = [2 * request, 2 * request + 1] if event.operation == "sendrecv" else [2 * request]
        for number in pairs:
            self._note("wait", event, [number, event.operation in ("send", "recv", "sendrecv")], 0, 0, 0)

    def _note(
        self, name: str, event: CollectiveEvent, request: list[Any], rank: int, sent: int, received: int,
        splits: Sequence[str] = ("[]", "[]"),
    ) -> None:  # fmt: skip
        ranks, pg = list(self._written.groups[event.group]), self._written.number(event.group)
        steps = {after - before for before, after in itertools.pairwise(ranks)}
        stride = steps.pop() if len(steps) == 1 else 0 if steps else 1
        values = [request, [pg, event.group], rank, name, [], [], ranks[0], stride, len(ranks)]
        types = ["Tuple[Int,Bool]", "Tuple[String,String]", "Int", "String", *["GenericList[]"] * 2, *["Int"] * 3]
        dtype = "Byte" if name == "wait" else _DTYPES[event.dtype]
        self._add(_CALL, 2, values, types, {
            "collective_name": name, "dtype": dtype, "in_msg_nelems": sent, "out_msg_nelems": received,
            "in_split_size": splits[0], "out_split_size": splits[1], "global_rank_start": ranks[0],
            "global_rank_stride": stride, "pg_name": pg, "pg_desc": event.group, "pg_size": len(ranks),
        })  # fmt: skip

    def _add(
        self, name: str, parent: int, values: Sequence[Any] = (), types: Sequence[str] = (),
        more: Mapping[str, str | int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        about = {"rf_id": len(self.nodes), "fw_parent": 0, "scope": 0, "tid": 1, "fw_tid": 0, "op_schema": ""}
        attributes = [
            {"name": key, "type": _KINDS[type(value)], "value": value} for key, value in (about | dict(more)).items()
        ]
        attributes.append({"name": "seq_id", "type": "int64", "value": -1})
        empty: dict[str, list[Any]] = {"values": [], "shapes": [], "types": []}
        inputs = {"values": list(values), "shapes": [[] for _ in values], "types": list(types)}
        self.nodes.append({
            "id": len(self.nodes) + 1, "name": name, "ctrl_deps": parent, "inputs": inputs, "outputs": empty,
            "attrs": attributes,
        })  # fmt: skip
