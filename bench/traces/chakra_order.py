"""The calls of a rank's Chakra trace that gives their order by dependencies alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from bench.traces import foreign, graph
from bench.traces.chakra_rank import COLLECTIVE, RECV, SEND, ChakraRank
from bench.traces.chakra_schema import COLLECTIVES, NODES
from bench.traces.chakra_writer import call_bytes
from bench.traces.foreign import ForeignCall
from commengine import UsageError
from commengine.operations import OPERATIONS

#: the kinds of nodes that a replay leaves out without a word: it has no compute
_SILENT = ("METADATA_NODE", "COMP_NODE")
_TENSOR = re.compile(r"Tensor\(([^)]+)\)")


def calls(rank: ChakraRank, left_out: Counter[str]) -> list[ForeignCall]:
    """The calls of a rank, in order. Adds the nodes that a replay leaves out to ``left_out``.

    A rank waits for a call before the first later call that depends on it. Raises UsageError that names the file and
    the node.
    """
    chosen = {number for number in rank.nodes if _is_call(rank, number, left_out)}
    data = any(node.data_deps for node in rank.nodes.values())  # ASTRA-sim follows these alone
    try:
        ordered = graph.in_order(
            graph.GraphNode(
                node.id, tuple(node.data_deps if data else node.ctrl_deps), node.start_time_micros, node.id in chosen
            )
            for node in rank.nodes.values()
        )
    except graph.GraphError as error:
        raise UsageError(f"{rank.path}: {error}") from None
    made = [_made(rank, one, place) for place, one in enumerate(graph.calls_of(ordered))]
    return foreign.marked(foreign.paired(made))


def _is_call(rank: ChakraRank, number: int, left_out: Counter[str]) -> bool:
    node, about = rank.nodes[number], rank.about[number]
    kind = NODES[node.type] if node.type < len(NODES) else f"node of type {node.type}"
    if node.type not in (SEND, RECV, COLLECTIVE):
        if kind not in _SILENT:
            left_out[kind] += 1
        return False
    needed = ["comm_size"] if about.get("comm_type") != COLLECTIVES.index("barrier") else []
    if node.type == COLLECTIVE:
        needed.append("comm_type")
    missing = [name for name in needed if name not in about]
    if missing:  # PyTorch's operators around the kernel that communicates; the kernel's node has them
        left_out[f"{kind} without {missing[0]}"] += 1
    return not missing


def _made(rank: ChakraRank, one: graph.Waiting, place: int) -> ForeignCall:
    """The call of a node. place: its place among the rank's calls."""
    node, where = rank.nodes[one.call], f"{rank.path}: node {one.call}"
    about, group = rank.about[node.id], rank.group(node.id)
    try:
        kind, root = _what(node, about, group.ranks)
        size = int(about.get("comm_size", 0))
        if not 0 <= size < foreign.MOST_ELEMENTS:
            raise ValueError(f"comm_size {size}")
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{where}: {str(error)[:200]}") from None
    counted = call_bytes(kind, size, len(group.ranks))
    if OPERATIONS[kind].counts_part:
        counted //= len(group.ranks)
    named = _dtype(node, about, counted)
    dtype = named or ("uint8" if counted % 4 else "float32")
    return ForeignCall(
        kind, group, dtype, counted // foreign.item_bytes(dtype), place,
        None if one.waited is None else one.waited - 0.5, 1e-6 * node.duration_micros,
        redop=foreign.reduction_of(str(about.get("redop") or node.name)), root=root,
        guessed=named is None and kind != "barrier",
    )  # fmt: skip


def _what(node: Any, about: Mapping[str, Any], ranks: tuple[int, ...]) -> tuple[str, int | None]:
    """(operation, root or the other rank of a message) of a node, as a rank of its group. Raises ValueError."""
    if node.type == COLLECTIVE:
        number = int(about["comm_type"])
        if not 0 <= number < len(COLLECTIVES):
            raise ValueError(f"comm_type {number} is unknown; there are 0 to {len(COLLECTIVES) - 1}")
        root = int(about.get("root", 0)) if OPERATIONS[COLLECTIVES[number]].rooted else None
        if root is not None and not 0 <= root < len(ranks):
            raise ValueError(f"root {root} is no rank of its group")
        return COLLECTIVES[number], root
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
