"""Faults that are planted in the engine's own code, of which the model must reject a recorded run."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from commengine.operations.all_reduce import AllReduce
from commengine.operations.broadcast import Broadcast
from commengine.operations.uneven.all_to_all_v import AllToAllV
from commengine.shared_memory.flags import Flags
from commengine.shared_memory.slots import Slots


class Mutation(NamedTuple):
    """A function of the engine, and what stands there instead of what."""

    function: Callable[..., Any]
    old: str
    new: str


_FENCE = "self._release()\n{0}self._acquire()\n{0}"
_ROUND, _AWAIT = "self._mine[_ROUND] = self._round\n    ", "self._await(_ROUND, self._round)"

MUTATIONS = {
    "a call does not wait for the others' calls": Mutation(Flags.begin, "self.meet()", "pass"),
    "a meeting waits for nobody": Mutation(Flags.meet, _AWAIT, "pass"),
    "a meeting waits for the last round": Mutation(Flags.meet, _AWAIT, "self._await(_ROUND, self._round - 1)"),
    "the round is told before the fence": Mutation(
        Flags.meet, _FENCE.format("    ") + _ROUND, _ROUND + _FENCE.format("    ")
    ),
    "no fence after a wait": Mutation(Flags._await, "self._release()\n    self._acquire()", "pass"),
    "no fence before a post": Mutation(Flags.post, _FENCE.format("    "), ""),
    "each call has the same words": Mutation(Flags.begin, "_ASKED + _WORDS + _ASKED - self._words", "_ASKED"),
    "the words follow the meeting": Mutation(
        Flags.begin,
        "mine[word], mine[word + 1], mine[word + 2] = place, about, checksum\n    self.meet()",
        "self.meet()\n    mine[word], mine[word + 1], mine[word + 2] = place, about, checksum",
    ),
    "numbers that do not fit are not told": Mutation(Flags.meet_unless, "self._mine[_UNFIT] = self._round + 1", "pass"),
    "there is one slot": Mutation(Slots.run, "number % self._slots", "number % 1"),
    "no wait for the chunks of the others": Mutation(Slots.run, "flags.wait_for(FILLED, number)", "pass"),
    "a chunk is told before it is filled": Mutation(
        Slots.run,
        "fill(chunk, slot)\n            if chunk:\n                flags.post(FILLED, number)",
        "if chunk:\n                flags.post(FILLED, number)\n            fill(chunk, slot)\n            if chunk:",
    ),
    "a reduced tensor is not waited for": Mutation(AllReduce.in_window, "memory.flags.meet()", "pass"),
    "a root goes on at once": Mutation(Broadcast.in_window, "memory.flags.meet()", "pass"),
    "rows in windows are not waited for": Mutation(AllToAllV.in_node, "flags.meet_unless(unfit)", "pass"),
}


def mutate(name: str) -> None:
    """Plant a fault in this process."""
    function, old, new = MUTATIONS[name]
    code = textwrap.dedent(inspect.getsource(function))
    if code.count(old) != 1:
        raise ValueError(f"{name}: {function.__qualname__} has not one {old!r}")
    space: dict[str, Any] = {}
    exec(
        compile(
            code.replace(old, new),
            inspect.getfile(function),
            "exec",
            __import__("__future__").annotations.compiler_flag,
        ),
        function.__globals__,
        space,
    )
    function.__code__ = space[function.__name__].__code__  # type: ignore[attr-defined]
