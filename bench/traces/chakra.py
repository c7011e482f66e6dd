"""Read a Chakra execution trace: what each rank communicates, with whom, and in which order.

Traces written here (`bench.traces.chakra_writer`) say of every call what a replay needs. In other traces the
dependencies give the order: a rank waits for a call before the first later call that depends on it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.step_study.recording import Group, require_ranks
from bench.traces import chakra_schema, foreign, graph
from bench.traces.chakra_schema import COLLECTIVES, NODES
from bench.traces.chakra_writer import GROUP_NAMES, GROUPS, TIMES, call_bytes
from bench.traces.foreign import ForeignCall, ranks_of
from commengine import UsageError
from commengine.files.reading import fault_in, read_json
from commengine.operations import IN_MEMORY, OPERATIONS

SEND, RECV, COLLECTIVE = (NODES.index(f"COMM_{kind}_NODE") for kind in ("SEND", "RECV", "COLL"))
#: the kinds of nodes that a replay leaves out without a word: it has no compute
_SILENT = ("METADATA_NODE", "COMP_NODE")
_FILE = re.compile(r"(.+)\.(\d+)\.et")
_TENSOR = re.compile(r"Tensor\(([^)]+)\)")


def files(paths: Sequence[Path]) -> list[Path]:
    """The files among ``paths`` that have the names of a Chakra trace, PREFIX.RANK.et, in the order of the ranks.

    Raises UsageError if they are of several traces, or if a rank's file is missing.
    """
    named = {path: match for path in paths if (match := _FILE.fullmatch(path.name))}
    prefixes = sorted({match[1] for match in named.values()})
    if len(prefixes) > 1:
        folder = next(iter(named)).parent
        raise UsageError(
            f"{folder}: holds the traces {', '.join(prefixes[:4])}; name one of them, such as {folder / prefixes[0]}"
        )
    found = {int(match[2]): path for path, match in named.items()}
    if found:
        require_ranks(found[max(found)].parent, found)
    return [found[rank] for rank in range(len(found))]


def read(paths: Sequence[Path], left_out: Counter[str], groups: Path | None = None) -> list[list[ForeignCall]]:
    """The calls of each rank, from one file for each. Adds the nodes that a replay leaves out to ``left_out``.

    groups: a file of the communicator groups by number, as ASTRA-sim takes it; by default comm_groups.json beside the
    trace, if it is there. Raises UsageError or InputFileError that names the file and the node.
    """
    beside = paths[0].with_name(GROUPS)
    given = _groups_of(groups or beside) if groups or beside.is_file() else {}
    ranks = [ChakraRank.of(path, given, len(paths)) for path in paths]
    exact = all(rank.exact for rank in ranks)
    return [rank.recorded() if exact else rank.ordered(left_out) for rank in ranks]


def _groups_of(path: Path) -> dict[str, Group]:
    found = read_json(path)
    with fault_in(f'{path}: want the ranks of each group by its number, such as {{"1": [0, 1]}}'):
        return {name: Group(f"group {name}", ranks_of(ranks)) for name, ranks in found.items()}


@dataclass(frozen=True)
class ChakraRank:
    """The file of a rank. nodes, about: the nodes and their attributes, by number. everyone: the group of all ranks."""

    path: Path
    nodes: dict[int, Any]
    about: dict[int, dict[str, Any]]
    groups: dict[str, Group]
    everyone: Group

    @classmethod
    def of(cls, path: Path, given: Mapping[str, Group], size: int) -> ChakraRank:
        """Read the file of one rank of ``size``. given: the groups from a file beside it."""
        metadata, nodes = chakra_schema.read_messages(path)
        everyone = Group("all ranks", tuple(range(size)))
        groups = dict(given)
        with fault_in(f"{path}: its groups cannot be read"):
            for node in nodes:
                if node.type == NODES.index("METADATA_NODE"):
                    groups |= _process_groups(node.inputs.values, everyone)
            for name, group in json.loads(chakra_schema.attributes(metadata).get(GROUP_NAMES, "{}")).items():
                groups[name] = Group(str(group["name"]), ranks_of(group["ranks"]))
        twice = [number for number, count in Counter(node.id for node in nodes).items() if count > 1]
        if twice:
            raise UsageError(f"{path}: there are two nodes {twice[0]}")
        about = {node.id: chakra_schema.attributes(node) for node in nodes}
        return cls(path, {node.id: node for node in nodes}, about, groups, everyone)

    @property
    def exact(self) -> bool:
        """Whether every call says what a replay needs, as those of `bench.traces.chakra_writer` do."""
        calls = [number for number, node in self.nodes.items() if node.type in (SEND, RECV, COLLECTIVE)]
        return all("times" in self.about[number] or "of_send" in self.about[number] for number in calls)

    def recorded(self) -> list[ForeignCall]:
        """The calls of a trace that is `exact`, as they were recorded."""
        received = {one["of_send"]: one for one in self.about.values() if "of_send" in one}
        found = []
        for number, about in self.about.items():
            if "times" in about:
                with fault_in(f"{self.path}: node {number}"):
                    found.append(self._recorded(number, about, received))
        return found

    def _recorded(self, number: int, about: Mapping[str, Any], received: Mapping[int, Any]) -> ForeignCall:
        noted = zip(TIMES, about["times"], strict=True)
        times = {name: None if math.isnan(moment) else moment for name, moment in noted}
        group, operation = self.group(number), about["operation"]
        buffers = [[size, shared] for size, shared in zip(about["buffer_bytes"], about["in_window"], strict=True)]
        if operation in IN_MEMORY and len(buffers) != 1 + OPERATIONS[operation].split:
            raise ValueError(f"{len(buffers)} buffers do not fit {operation}")
        if operation == "sendrecv" and len(group.ranks) > 1:
            buffers[1][0] = received[number]["comm_size"]
        exact = times | {
            "operation": operation, "shape": about["shape"], "dtype": about["dtype"], "redop": about.get("redop"),
            "root": about.get("root"), "stream": about.get("stream"), "peers": about.get("peers", []),
            "buffers": buffers, "bytes": call_bytes(operation, about["comm_size"], len(group.ranks)),
        }  # fmt: skip
        return ForeignCall("barrier", group, "uint8", 0, float(times["enqueue"] or 0.0), None, 0.0, exact=exact)

    def ordered(self, left_out: Counter[str]) -> list[ForeignCall]:
        """The calls of a trace that gives their order by dependencies. Counts in ``left_out`` what a replay leaves out.

        Raises UsageError that names the file and the node.
        """
        chosen = {number for number in self.nodes if self._is_call(number, left_out)}
        data = any(node.data_deps for node in self.nodes.values())  # ASTRA-sim follows these alone
        before = {one.id: set(one.data_deps if data else one.ctrl_deps) for one in self.nodes.values()}
        with fault_in(str(self.path)):
            order = graph.in_order(before, {one.id: one.start_time_micros for one in self.nodes.values()})
        calls = enumerate(graph.waits(order, before, chosen))
        made = [self._made(number, place, waited) for place, (number, waited) in calls]
        return foreign.marked(foreign.paired(made))

    def _is_call(self, number: int, left_out: Counter[str]) -> bool:
        node, about = self.nodes[number], self.about[number]
        kind = NODES[node.type] if node.type < len(NODES) else f"node of type {node.type}"
        if node.type not in (SEND, RECV, COLLECTIVE):
            left_out.update([] if kind in _SILENT else [kind])
            return False
        needed = ["comm_size"] if about.get("comm_type") != COLLECTIVES.index("barrier") else []
        if node.type == COLLECTIVE:
            needed.append("comm_type")
        missing = [name for name in needed if name not in about]
        if missing:  # PyTorch's operators around the kernel that communicates; the kernel's node has them
            left_out[f"{kind} without {missing[0]}"] += 1
        return not missing

    def _made(self, number: int, place: int, waited: int | None) -> ForeignCall:
        """The call of a node. place, waited: its place among the rank's calls, and that of the call that needs it."""
        node, about, group = self.nodes[number], self.about[number], self.group(number)
        with fault_in(f"{self.path}: node {number}"):
            kind, root = _what(node, about, group.ranks)
            counted = call_bytes(kind, int(about.get("comm_size", 0)), len(group.ranks))
            if OPERATIONS[kind].counts_part:
                counted //= len(group.ranks)
            named = _dtype(node, about, counted)
            dtype = named or ("uint8" if counted % 4 else "float32")
            return ForeignCall(
                kind, group, dtype, foreign.believed(kind, counted // foreign.item_bytes(dtype)), place,
                None if waited is None else waited - 0.5, 1e-6 * node.duration_micros,
                redop=foreign.reduction_of(str(about.get("redop") or node.name)), root=root,
                guessed=named is None and kind != "barrier",
            )  # fmt: skip

    def group(self, number: int) -> Group:
        """The group of a call. Raises UsageError if the trace does not say its ranks, or this rank is not one."""
        about, where = self.about[number], f"{self.path}: node {number}"
        name, dimensions = str(about.get("pg_name", "")), about.get("involved_dim")
        if not name and isinstance(dimensions, list) and not all(dimensions):
            raise UsageError(
                f"{where}: its group is given by dimensions of a network that the trace does not have (involved_dim); "
                "only traces with process groups (pg_name) can be replayed"
            )
        found = self.groups.get(name, self.everyone if name in ("", "0") else None)
        if found is None:
            raise UsageError(
                f"{where}: the ranks of group {name!r} are not known; give the file of groups that ASTRA-sim takes "
                f"with --groups, or name it {GROUPS} beside the trace"
            )
        return found


def _process_groups(values: str, everyone: Group) -> dict[str, Group]:
    """The process groups that PyTorch's profiler notes in a node: JSON inside the text of a list."""
    begin, end = values.find("[{"), values.rfind("}]")
    if begin < 0 or end < begin or "pg_name" not in values:
        return {}
    found = {}
    for one in json.loads(values[begin : end + 2]):
        name, ranks = str(one["pg_name"]), one["ranks"]
        found[name] = Group(f"group {name}", ranks_of(ranks) if ranks else everyone.ranks)
    return found


def _what(node: Any, about: Mapping[str, Any], ranks: tuple[int, ...]) -> tuple[str, int | None]:
    """(operation, root or the other rank of a message) of a node, as a rank of its group. Raises ValueError."""
    if node.type == COLLECTIVE:
        number = int(about["comm_type"])
        if not 0 <= number < len(COLLECTIVES):
            raise ValueError(f"comm_type {number} is unknown; there are 0 to {len(COLLECTIVES) - 1}")
        return COLLECTIVES[number], int(about.get("root", 0)) if OPERATIONS[COLLECTIVES[number]].rooted else None
    name = "comm_dst" if node.type == SEND else "comm_src"
    peer = about.get(name)
    if peer not in ranks:
        raise ValueError(f"{name} is {'missing' if peer is None else f'{peer}, which is no rank of its group'}")
    return "send" if node.type == SEND else "recv", ranks.index(peer)


def _dtype(node: Any, about: Mapping[str, Any], nbytes: int) -> str | None:
    """The dtype that a node names itself, or by its input; None if there is none that fits its bytes."""
    named = _TENSOR.search(node.inputs.types)
    found = foreign.dtype_of(str(about.get("dtype", named[1] if named else "")))
    return None if found is None or nbytes % foreign.item_bytes(found) else found
