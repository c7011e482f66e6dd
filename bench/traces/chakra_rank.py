"""One rank's file of a Chakra trace: its nodes, their attributes, and the groups that they communicate in."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.step_study.recording import Group
from bench.traces import chakra_schema
from bench.traces.chakra_schema import NODES
from bench.traces.chakra_writer import GROUP_NAMES, GROUPS, TIMES, call_bytes
from bench.traces.foreign import ForeignCall
from commengine import UsageError
from commengine.operations import IN_MEMORY, OPERATIONS

SEND, RECV, COLLECTIVE = (NODES.index(f"COMM_{kind}_NODE") for kind in ("SEND", "RECV", "COLL"))


def ranks_of(found: Any) -> tuple[int, ...]:
    """A list of ranks in JSON. Raises ValueError for anything else."""
    if not isinstance(found, list) or not found or not all(type(one) is int and one >= 0 for one in found):
        raise ValueError(f"{str(found)[:50]} is not a list of ranks")
    if len(set(found)) < len(found):
        raise ValueError(f"{str(found)[:50]} has a rank twice")
    return tuple(found)


@dataclass(frozen=True)
class ChakraRank:
    """The file of a rank. nodes, about: the nodes and their attributes, by number. everyone: the group of all ranks."""

    rank: int
    path: Path
    nodes: dict[int, Any]
    about: dict[int, dict[str, Any]]
    groups: dict[str, Group]
    everyone: Group

    @classmethod
    def of(cls, rank: int, path: Path, given: Mapping[str, Group], size: int) -> ChakraRank:
        """Read the file of one rank of ``size``. given: the groups from a file beside it."""
        metadata, nodes = chakra_schema.read_messages(path)
        everyone = Group("all ranks", tuple(range(size)))
        groups = dict(given)
        try:
            for node in nodes:
                if node.type == NODES.index("METADATA_NODE"):
                    groups |= _process_groups(node.inputs.values, everyone)
            for name, group in json.loads(chakra_schema.attributes(metadata).get(GROUP_NAMES, "{}")).items():
                groups[name] = Group(str(group["name"]), ranks_of(group["ranks"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{path}: its groups cannot be read: {str(error)[:200]}") from None
        twice = [number for number, count in Counter(node.id for node in nodes).items() if count > 1]
        if twice:
            raise UsageError(f"{path}: there are two nodes {twice[0]}")
        about = {node.id: chakra_schema.attributes(node) for node in nodes}
        return cls(rank, path, {node.id: node for node in nodes}, about, groups, everyone)

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
            if "times" not in about:
                continue
            try:
                found.append(self._recorded(number, about, received))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                if isinstance(error, UsageError):
                    raise
                missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                raise UsageError(f"{self.path}: node {number}: {missing[:200]}") from None
        return found

    def _recorded(self, number: int, about: Mapping[str, Any], received: Mapping[int, Any]) -> ForeignCall:
        times = {
            name: None if math.isnan(moment) else moment for name, moment in zip(TIMES, about["times"], strict=True)
        }
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
        if self.rank not in found.ranks:
            raise UsageError(f"{where}: rank {self.rank} is not in group {name!r}, which has ranks {list(found.ranks)}")
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
