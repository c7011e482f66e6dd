"""The order of a rank's calls, from a graph of dependencies: when each begins, and when the rank waits for it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GraphNode:
    """A node of a rank's graph. before: the nodes that must have ended. start: when it began, if that is known, or 0.

    calls: whether it communicates; the others only order the calls.
    """

    number: int
    before: tuple[int, ...]
    start: float
    calls: bool


class GraphError(ValueError):
    """The nodes are no graph of dependencies."""


def in_order(nodes: Iterable[GraphNode]) -> list[GraphNode]:
    """The nodes, each after all those before it; of the nodes that may come next, the earliest, and the lowest number.

    Raises GraphError for a number that is there twice, a node that is not there, and a circle.
    """
    by_number: dict[int, GraphNode] = {}
    for node in nodes:
        if node.number in by_number:
            raise GraphError(f"there are two nodes {node.number}")
        by_number[node.number] = node
    after: dict[int, list[int]] = defaultdict(list)
    missing = {}
    for node in by_number.values():
        before = set(node.before)
        missing[node.number] = len(before)
        for number in before:
            if number not in by_number:
                raise GraphError(f"node {node.number} depends on node {number}, which is not there")
            after[number].append(node.number)
    ready = [(node.start, node.number) for node in by_number.values() if not missing[node.number]]
    heapq.heapify(ready)
    found = []
    while ready:
        _, number = heapq.heappop(ready)
        found.append(by_number[number])
        for other in after[number]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (by_number[other].start, other))
    if len(found) < len(by_number):
        stuck = min(number for number, count in missing.items() if count)
        raise GraphError(f"node {stuck} depends on itself, through other nodes")
    return found


@dataclass(frozen=True)
class Waiting:
    """A call of a rank. call: its node. waited: the first later call that needs its end, by place; None: no call."""

    call: int
    waited: int | None


def calls_of(ordered: Sequence[GraphNode]) -> list[Waiting]:
    """The calls among nodes that `in_order` gave, with the place of the first later call that depends on each."""
    calls = [node.number for node in ordered if node.calls]
    place = {number: index for index, number in enumerate(calls)}
    left: dict[int, int] = defaultdict(int)  # how many nodes still need a node's ancestors
    for node in ordered:
        for number in set(node.before):
            left[number] += 1
    needs: dict[int, int] = {}  # the calls that a node comes after, as the bits of an integer
    waited: list[int | None] = [None] * len(calls)
    unwaited = 0
    for node in ordered:
        found = 0
        for number in set(node.before):
            found |= needs[number]
            left[number] -= 1
            if not left[number]:
                del needs[number]
        if node.calls:
            new = found & unwaited
            unwaited &= ~new
            while new:
                lowest = (new & -new).bit_length() - 1
                waited[lowest] = place[node.number]
                new &= new - 1
            unwaited |= 1 << place[node.number]
            found |= 1 << place[node.number]
        if left[node.number]:
            needs[node.number] = found
    return [Waiting(number, when) for number, when in zip(calls, waited, strict=True)]
