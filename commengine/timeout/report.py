"""The report of a rank whose collective ran out of time: the missing ranks, and its own last collectives."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from .entries import Entry

#: missing ranks that a report names one by one
NAMED = 16


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


def missing_ranks(entry: Entry, root_rank: int, told: Mapping[int, dict[str, Any]]) -> list[str]:
    """Name the ranks that have not come to ``entry``, as ``rank R, OPERATION #K`` and how far that rank is.

    root_rank: this rank in the root communicator. told: the messages of the other ranks, by their rank there.
    """
    group, found = entry.group, []
    what = f"{entry.operation} #{entry.number}"
    for member in entry.peers or range(len(group.ranks)):
        other, rank = group.ranks[member], group.world_ranks[member]
        if other == root_rank:
            continue
        said = told.get(other)
        if said is None:
            found.append(f"rank {rank}, {what} (it does not answer)")
        elif entry.peers:
            if group.ranks.index(root_rank) not in said["peers"].get(group.key, ()):
                found.append(f"rank {rank}, {what} (it neither sends to this rank nor receives from it)")
        else:
            number, operation = said["sequences"].get(f"{group.key} {entry.sequence}", (0, ""))
            if number < entry.number:
                last = f"its last there is {operation} #{number}" if number else "it has made no call there"
                found.append(f"rank {rank}, {what} ({last})")
            elif number == entry.number and operation != entry.operation:
                found.append(f"rank {rank}, {what} (it is in {operation} #{number} instead)")
    return found


def suspects(entry: Entry, root_rank: int) -> list[str]:
    """Name the ranks that ``entry`` exchanges messages with, after a crash in it: at least one of them may be dead."""
    group = entry.group
    members = entry.peers or range(len(group.ranks))
    others = [group.world_ranks[member] for member in members if group.ranks[member] != root_rank]
    what = f"{entry.operation} #{entry.number}"
    if len(others) == 1:
        return [f"rank {others[0]}, {what} (the crash was in this call)"]
    shown = ", ".join(map(str, others[:NAMED])) + (" ..." if len(others) > NAMED else "")
    return [f"perhaps one of ranks {shown}, {what} (the crash was in this call)"] if others else []
