"""Where the waits and the fences of the model stand in the code: the same names, found in the syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ENGINE = Path(__file__).resolve().parent.parent.parent / "commengine"
FOLDERS = ("shared_memory", "operations", "operations/uneven", "calls")

#: what waits, publishes, or is half of a fence (the other half, `_acquire`, is its next line)
WAITS = re.compile(
    r"((self|slots)\.)?flags\.(meet|meet_unless|begin|begin_uneven|post|wait_for)"
    r"|memory\.(flags\.(meet|begin)|begin)|self\.(meet|_await|_release|_all)"
)


class Place(NamedTuple):
    """A call in the code. file: below commengine. function: its qualified name."""

    file: str
    function: str
    call: str


_FLAGS, _REDUCE, _SCATTER = "shared_memory/flags.py", "operations/all_reduce.py", "operations/reduce_scatter.py"
_GATHER, _ROWS = "operations/all_gather.py", "operations/uneven/all_to_all_v.py"
_GATHER_ROWS = "operations/uneven/all_gather_v.py"

#: the places of each wait and each fence that the model can leave out
PLACES = {
    "MEET_FENCE": [Place(_FLAGS, "Flags.meet", "self._release")],
    "MEET_WAIT": [Place(_FLAGS, "Flags.meet", "self._await")],
    "POST_FENCE": [Place(_FLAGS, "Flags.post", "self._release")],
    "AWAIT_FENCE": [Place(_FLAGS, "Flags._await", "self._release")],
    "BEGIN_MEET": [Place(_FLAGS, "Flags.begin", "self.meet")],
    "BEGIN_UNEVEN_MEET": [Place(_FLAGS, "Flags.begin_uneven", "self.meet")],
    "MEET_UNLESS_MEET": [Place(_FLAGS, "Flags.meet_unless", "self.meet")],
    "WINDOW_BEGIN": [
        Place("shared_memory/sequence.py", "SequenceMemory.begin", "self.flags.begin"),
        Place(_REDUCE, "AllReduce.in_window", "memory.begin"),
        Place(_SCATTER, "reduce_row", "memory.begin"),
        Place(_GATHER, "AllGather.in_window", "memory.begin"),
        Place(_GATHER, "gather_row", "memory.begin"),
        Place("operations/broadcast.py", "Broadcast.in_window", "memory.begin"),
    ],
    "ROUTES_BEGIN": [Place("calls/routes.py", "Routes._through_memory.run", "memory.flags.begin")],
    "SLOTS_BEGIN": [Place("shared_memory/slots.py", "Slots.run", "flags.begin")],
    "FILLED_POST": [Place("shared_memory/slots.py", "Slots.run", "flags.post")],
    "FILLED_WAIT": [
        Place("shared_memory/slots.py", "Slots.run", "flags.wait_for"),
        Place(_FLAGS, "Flags.wait_for", "self._await"),
    ],
    "REDUCED_POST": [Place(_REDUCE, "_reduce_rows.take", "slots.flags.post")],
    "REDUCED_WAIT": [Place(_REDUCE, "_reduce_rows.take", "slots.flags.wait_for")],
    "ALL_REDUCE_END": [Place(_REDUCE, "AllReduce.in_window", "memory.flags.meet")],
    "REDUCE_SCATTER_END": [Place(_SCATTER, "reduce_row", "memory.flags.meet")],
    "ALL_GATHER_END": [Place(_GATHER, "AllGather.in_window", "memory.flags.meet")],
    "GATHER_INTO_END": [Place(_GATHER, "gather_row", "memory.flags.meet")],
    "BROADCAST_END": [Place("operations/broadcast.py", "Broadcast.in_window", "memory.flags.meet")],
    "ALL_TO_ALL_V_BEGIN": [Place(_ROWS, "AllToAllV.in_node.run", "flags.begin_uneven")],
    "ALL_TO_ALL_V_END": [Place(_ROWS, "AllToAllV.in_node.run", "flags.meet_unless")],
    "ALL_TO_ALL_V_PEERS_END": [Place(_ROWS, "AllToAllV.in_node.run", "flags.meet")],
    "ALL_GATHER_V_BEGIN": [Place(_GATHER_ROWS, "AllGatherV.in_node.run", "flags.begin_uneven")],
    "ALL_GATHER_V_END": [Place(_GATHER_ROWS, "AllGatherV.in_node.run", "flags.meet_unless")],
    "OPEN_AGREES": [Place("shared_memory/segment.py", "NodeMemory._open", "self._all")],
    "MAKE_AGREES": [Place("shared_memory/segment.py", "NodeMemory.make", "self._all")],
}


def found() -> list[Place]:
    """Return the places of all waits, posts and fences of the code."""
    files = sorted(file for folder in FOLDERS for file in (ENGINE / folder).glob("*.py"))
    return [
        Place(file.relative_to(ENGINE).as_posix(), function, call)
        for file in files
        for function, call in _calls(ast.parse(file.read_text()), "")
    ]


def _calls(node: ast.AST, within: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = within
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{within}.{child.name}".lstrip(".")
        elif isinstance(child, ast.Call) and WAITS.fullmatch(call := ast.unparse(child.func)):
            yield within, call
        yield from _calls(child, inner)
