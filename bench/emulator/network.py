"""Carry the messages of collectives over the links of an emulated machine, event by event, in its own time.

A message inside a node occupies its sender's port. One between nodes occupies the adapters of both nodes. Messages that
want the same port or adapter go one after another, in the order in which they became ready, so collectives that run at
the same time share it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from bench.emulator.machine import EmulatedMachine
from bench.emulator.schedules import MessageStep, Schedule, schedule


@dataclass
class CollectiveInFlight:
    """A collective of ``members``, which are ranks.

    arrived: (receiver, sender) -> messages that no step has taken. walks: by member that has joined, what goes on with
    its steps at the time that it is sent.
    """

    members: Sequence[int]
    steps: Schedule
    arrived: Counter[tuple[int, int]] = field(default_factory=Counter)
    walks: dict[int, Generator[None, float]] = field(default_factory=dict)


class Network:
    """The links, and what is on them. done: of `join`; it gets a member's rank and the time at which it is through."""

    def __init__(self, machine: EmulatedMachine, seed: int = 0) -> None:
        self._machine = machine
        self._draw = random.Random(seed)
        self._events: list[tuple[float, tuple[int, int], int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._free: dict[tuple[str, int], float] = {}
        self._running: dict[tuple[object, int], CollectiveInFlight] = {}

    def join(
        self, group: object, number: int, members: Sequence[int], rank: int, operation: str, nbytes: float,
        time: float, done: Callable[[int, float], None], actor: int = 0,
    ) -> None:  # fmt: skip
        """Let one member of a group begin its ``number``-th collective at ``time``. actor: the thread that does so."""
        machine, key, me = self._machine, (group, number), members.index(rank)
        if key not in self._running:
            nodes = [machine.node(one) for one in members] if machine.two_levels else None
            steps = schedule(operation, nbytes, len(members), machine.short, nodes)
            self._running[key] = CollectiveInFlight(members, steps)
        found = self._running[key]
        found.walks[me] = self._walk(found, me, done)
        next(found.walks[me])
        if len(found.walks) == len(members):
            del self._running[key]
        # Threads that come at the same time have an order, whichever this machine's scheduler lets speak first.
        self._at(time, partial(self._arrive, found, me, me), (1 + rank, actor))

    def next_event(self) -> float | None:
        """The time of the next event, or None."""
        return self._events[0][0] if self._events else None

    def run(self, until: float) -> None:
        """Let everything happen that happens up to this time."""
        while self._events and self._events[0][0] <= until:
            time, _, _, action = heapq.heappop(self._events)
            action(time)

    def _at(self, time: float, action: Callable[[float], None], order: tuple[int, int] = (0, 0)) -> None:
        heapq.heappush(self._events, (time, order, next(self._numbers), action))

    def _arrive(self, one: CollectiveInFlight, sender: int, me: int, now: float) -> None:
        one.arrived[me, sender] += 1
        if me in one.walks:
            with suppress(StopIteration):
                one.walks[me].send(now)

    def _walk(self, one: CollectiveInFlight, me: int, done: Callable[[int, float], None]) -> Generator[None, float]:
        """A member's steps, each as soon as all messages that it waits for are there. Its own beginning is one, too."""
        now = 0.0
        for step in (MessageStep(receive=[me]), *one.steps[me]):
            for target, nbytes in step.send:
                arrival = self._carry(one.members[me], one.members[target], nbytes, now)
                self._at(arrival, partial(self._arrive, one, me, target))
            while not all(one.arrived[me, sender] for sender in step.receive):
                now = yield
            one.arrived.subtract((me, sender) for sender in step.receive)
        done(one.members[me], now)

    def _carry(self, sender: int, receiver: int, nbytes: float, now: float) -> float:
        """The arrival of a message that is ready now."""
        machine = self._machine
        here, there = machine.node(sender), machine.node(receiver)
        if here == there:
            wire, places, factor = machine.inside, [("port", sender)], 1.0
        else:
            wire, places = machine.between, [("out", here), ("in", there)]
            factor = max(machine.slow[here], machine.slow[there])
        start = max([now, *(self._free.get(place, 0.0) for place in places)])
        if start > now:
            factor *= 1 + machine.contention
        end = start + nbytes * wire.beta * factor
        for place in places:
            self._free[place] = end
        return end + wire.alpha * max(0.0, self._draw.gauss(1.0, machine.jitter))
