"""The order of a rank's calls, from a graph of dependencies: when each begins, and when the rank waits for it."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter


def in_order(before: Mapping[int, Collection[int]], start: Mapping[int, float]) -> list[int]:
    """The nodes, each after all those before it; of the nodes that may come next, the earliest, and the lowest number.

    before: the nodes that must have ended, by node. start: when each began, if that is known, or 0. Raises ValueError
    for a node that is not there, and for a circle.
    """
    for node, needed in before.items():
        if gone := [one for one in needed if one not in before]:
            raise ValueError(f"node {node} depends on node {gone[0]}, which is not there")
    order = TopologicalSorter(before)
    try:
        order.prepare()
    except CycleError as error:
        raise ValueError(f"node {min(error.args[1])} depends on itself, through other nodes") from None
    ready: list[tuple[float, int]] = []
    found = []
    while order.is_active():
        for node in order.get_ready():
            heapq.heappush(ready, (start[node], node))
        _, node = heapq.heappop(ready)
        found.append(node)
        order.done(node)
    return found


def waits(
    ordered: Sequence[int], before: Mapping[int, Collection[int]], calls: Collection[int]
) -> list[tuple[int, int | None]]:
    """(node, the place of the first later call that needs its end, or None) of each of ``calls``, in order.

    ordered: all nodes, as `in_order` gives them. The other nodes only order the calls.
    """
    place = {node: number for number, node in enumerate(one for one in ordered if one in calls)}
    first: dict[int, int] = {}  # of the calls after a node
    for node in reversed(ordered):
        needed = place.get(node, first.get(node))
        if needed is not None:
            for one in before[node]:
                first[one] = min(needed, first.get(one, needed))
    return [(node, first.get(node)) for node in place]
