"""The report of a rank whose collective ran out of time: the missing ranks, and its own last collectives."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from .entries import Entry

#: missing ranks that a report names one by one
NAMED = 16

#: what is said of a rank of which nothing else is known
NO_CALL = "it has made no call there"


def write_report(world_rank: int, problem: str, missing: list[str] | None, entries: Iterable[Entry]) -> str:
    """Return the report of the rank ``world_rank``.

    problem: what is wrong. missing: from `missing_ranks`, or None if no collective of this rank is waiting. entries:
    this rank's last collectives.
    """
    lines = []
    if missing is not None:
        missing = missing or ["nobody, every rank is in it"]
        lines = [f"missing: {who}" for who in missing[:NAMED]]
        if len(missing) > NAMED:
            lines.append(f"missing: {len(missing) - NAMED} more ranks")
    last = [f"  {entry}" for entry in entries] or ["  none"]
    return "\n".join([f"[rank {world_rank}] {problem}", *lines, f"last collectives of rank {world_rank}:", *last])


def out_of_time(entry: Entry, timeout: float) -> str:
    """Say that ``entry`` has run longer than ``timeout`` seconds."""
    waited = f"after {time.monotonic() - entry.started:.1f} s (timeout {timeout:g} s)"
    return f"{entry.operation} #{entry.number} of group {entry.group.name!r}{entry.about} is not done {waited}"


def where(entry: Entry) -> list[Any]:
    """Return where the rank of ``entry`` waits, as JSON types. The peers of a message are ranks of the root."""
    peers = [entry.group.ranks[member] for member in entry.peers]
    return [entry.group.key, entry.sequence, entry.number, entry.operation, peers]


class Replies:
    """The answers of the ranks. They tell each rank that answered who is missing where it waits.

    said: by rank of the root communicator: how far it is (``sequences``), with which ranks it exchanges messages of
    each group (``peers``), and where it waits (``waits``). size: of the root communicator.
    """

    def __init__(self, said: Mapping[int, dict[str, Any]], size: int) -> None:
        self._said = said
        self._silent = _stretches(rank for rank in range(size) if rank not in said)
        self._started: dict[str, list[tuple[int, int, str]]] = {}
        for rank in sorted(said):
            for sequence, (number, operation) in said[rank]["sequences"].items():
                self._started.setdefault(sequence, []).append((rank, number, operation))
        self._found: dict[tuple[Any, ...], dict[str, Any]] = {}

    def about(self, rank: int) -> dict[str, Any]:
        """Return where ``rank`` waits, and by what is said of them the stretches of ranks; "": they have come there.

        A rank of which nothing is said has made no call there.
        """
        waits = self._said[rank]["waits"]
        if waits is None:
            return {}
        key, sequence, number, operation, peers = waits
        place = key, sequence, number, operation, rank if peers else None
        if place not in self._found:
            why: dict[str, list[int]] = {}
            for other in (other for other in peers if other in self._said):
                met = rank in self._said[other]["peers"].get(key, ())
                why.setdefault("" if met else "it neither sends to this rank nor receives from it", []).append(other)
            for other, last, its in () if peers else self._started.get(f"{key} {sequence}", ()):
                behind = f"its last there is {its} #{last}" if last < number else ""
                elsewhere = f"it is in {its} #{last} instead" if last == number and its != operation else ""
                why.setdefault(behind or elsewhere, []).append(other)
            ranks = {text: _stretches(others) for text, others in why.items()}
            self._found[place] = {"waits": waits, "ranks": ranks | {"it does not answer": self._silent}}
        return self._found[place]


def _stretches(ranks: Iterable[int]) -> list[list[int]]:
    """Return growing ``ranks`` as stretches of neighbours: each stretch's first rank, and the first one after it."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank:
            found[-1][1] = rank + 1
        else:
            found.append([rank, rank + 1])
    return found


def missing_ranks(entry: Entry, root_rank: int, ranks: Mapping[str, list[list[int]]]) -> list[str]:
    """Name the ranks that have not come to ``entry``, as ``rank R, OPERATION #K`` and how far that rank is.

    root_rank: this rank in the root communicator. ranks: of `Replies.about`.
    """
    group = entry.group
    why = {rank: text for text, found in ranks.items() for first, end in found for rank in range(first, end)}
    what = f"{entry.operation} #{entry.number}"
    others = [member for member in entry.peers or range(len(group.ranks)) if group.ranks[member] != root_rank]
    told = [(group.world_ranks[member], why.get(group.ranks[member], NO_CALL)) for member in others]
    return [f"rank {rank}, {what} ({text})" for rank, text in told if text]
