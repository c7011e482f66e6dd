"""The calls of a rank's Chakra trace that gives their order by dependencies alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _OrderedCall:
    """A node that communicates. place, waited: as in `graph.Waiting`. receive: the other node of a sendrecv."""

    node: Any
    place: int
    waited: int | None
    receive: Any = None


def calls(rank: ChakraRank, left_out: Counter[str]) -> list[ForeignCall]:
    """The calls of a rank, in order. Adds the nodes that a replay leaves out to ``left_out``.

    A rank waits for a call before the first later call that depends on it. If this is not the next call, the two
    overlap. Raises UsageError that names the file and the node.
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
    found = [_OrderedCall(rank.nodes[one.call], place, one.waited) for place, one in enumerate(graph.calls_of(ordered))]
    paired = _paired(found, rank.about)
    following = [*(call.place for call in paired[1:]), None]
    return [_made(rank, call, after) for call, after in zip(paired, following, strict=False)]


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


def _paired(found: Sequence[_OrderedCall], about: Mapping[int, Mapping[str, Any]]) -> list[_OrderedCall]:
    """A send and a receive that come one after the other become one sendrecv.

    In a Chakra trace a send may end before its receive begins, so a receive may depend on the send before it; in a
    replay all ranks of a ring would wait in their sends. A send that depends on the receive before it stays apart.
    """
    paired: list[_OrderedCall] = []
    for call in found:
        last = paired[-1] if paired and paired[-1].receive is None else None
        if last is not None:
            kinds = (last.node.type, call.node.type)
            together = kinds == (SEND, RECV) or (kinds == (RECV, SEND) and last.waited != call.place)
            if together and about[last.node.id].get("pg_name") == about[call.node.id].get("pg_name"):
                send, receive = (last.node, call.node) if kinds == (SEND, RECV) else (call.node, last.node)
                waits = [one.waited for one in (last, call) if one.waited is not None and one.waited > call.place]
                paired[-1] = _OrderedCall(send, last.place, min(waits, default=None), receive)
                continue
        paired.append(call)
    return paired


def _made(rank: ChakraRank, call: _OrderedCall, following: int | None) -> ForeignCall:
    """The call of a node. following: the place of the next one; None after the last."""
    node, where = call.node, f"{rank.path}: node {call.node.id}"
    about, group = rank.about[node.id], rank.group(node.id)
    try:
        kind, root, peers, received = _what(rank, call, group.ranks)
        size = int(about.get("comm_size", 0))
        if not 0 <= size < foreign.MOST_ELEMENTS:
            raise ValueError(f"comm_size {size}")
        counted = call_bytes(kind, size, len(group.ranks))
        if OPERATIONS[kind].counts_part:
            counted = size if kind == "gather" else size // len(group.ranks)
    except (TypeError, ValueError, IndexError) as error:
        raise UsageError(f"{where}: {str(error)[:200]}") from None
    named = _dtype(node, about, counted)
    dtype = named or ("uint8" if counted % 4 else "float32")
    overlaps = following is not None and call.waited != following
    waited: float | None
    if call.waited is not None:
        waited = call.waited - 0.5
    else:
        waited = call.place + 0.5 if following is None else None
    return ForeignCall(
        kind, group, dtype, counted // foreign.item_bytes(dtype), call.place, waited, 1e-6 * node.duration_micros,
        overlaps, redop=foreign.reduction_of(str(about.get("redop") or node.name)), root=root, peers=peers,
        received=received, guessed=named is None and kind != "barrier",
    )  # fmt: skip


def _what(rank: ChakraRank, call: _OrderedCall, ranks: tuple[int, ...]) -> tuple[str, int | None, tuple[int, ...], int]:
    """(operation, root, peers, bytes received) of a node. Raises ValueError."""
    about = rank.about[call.node.id]
    if call.node.type == COLLECTIVE:
        number = int(about["comm_type"])
        if not 0 <= number < len(COLLECTIVES):
            raise ValueError(f"comm_type {number} is unknown; there are 0 to {len(COLLECTIVES) - 1}")
        root = int(about.get("root", 0)) if OPERATIONS[COLLECTIVES[number]].rooted else None
        if root is not None and not 0 <= root < len(ranks):
            raise ValueError(f"root {root} is no rank of its group")
        return COLLECTIVES[number], root, (), 0
    ends = {"comm_dst": call.node} if call.node.type == SEND else {"comm_src": call.node}
    if call.receive is not None:
        ends["comm_src"] = call.receive
    peers = []
    for name, node in ends.items():
        peer = rank.about[node.id].get(name)
        if peer not in ranks:
            raise ValueError(f"{name} is {'missing' if peer is None else f'{peer}, which is no rank of its group'}")
        peers.append(ranks.index(peer))
    if call.receive is None:
        return "send" if call.node.type == SEND else "recv", peers[0], tuple(peers), 0
    return "sendrecv", peers[0], tuple(peers), int(rank.about[call.receive.id]["comm_size"])


def _dtype(node: Any, about: Mapping[str, Any], nbytes: int) -> str | None:
    """The dtype that a node names itself, or by its input; None if there is none that fits its bytes."""
    named = _TENSOR.search(node.inputs.types)
    found = foreign.dtype_of(str(about.get("dtype", named[1] if named else "")))
    return None if found is None or nbytes % foreign.item_bytes(found) else found
