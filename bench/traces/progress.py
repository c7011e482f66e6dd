"""Whether a replay would come to its end: no ranks wait for each other for ever.

Our own recordings are of runs that ended. Another tool's trace may be made by hand, and its runtime may let a send end
before the receive begins, which a replay does not.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TypeAlias

from bench.step_study.recording import MESSAGES, RecordedCall, Recording
from commengine import UsageError

#: the calls of one stream run one after the other: (rank of the run, group, stream)
Queue: TypeAlias = tuple[int, int, int]


def check_ends(what: Recording) -> None:
    """Raise UsageError that names two calls if the ranks would wait for each other in a replay.

    A collective ends when all ranks of its group have come to it, and a message when both ranks have. Of a call on a
    stream, a rank waits only where the recording does.
    """
    run = _Run(what)
    while run.caller_steps() or run.calls_end():
        pass
    stuck = [rank for rank, moments in enumerate(run.todo) if run.at[rank] < len(moments)]
    if stuck:
        names = [run.named(rank) for rank in stuck[:2]]
        raise UsageError(f"a replay would not end, because ranks wait for each other: {', '.join(names)}")


class _Run:
    """A replay without its data. at: how many moments of ``todo`` each rank has behind it."""

    def __init__(self, what: Recording) -> None:
        self.what = what
        self.todo = [_moments(calls) for calls in what.calls]
        self.at = [0] * what.size
        self._queues: dict[Queue, list[int]] = defaultdict(list)  # the numbers of calls, in order
        self._place: list[list[int]] = []  # of each call in its queue
        for rank, calls in enumerate(what.calls):
            self._place.append([])
            for number, call in enumerate(calls):
                queue = self._queues[rank, call.group, call.stream]
                self._place[rank].append(len(queue))
                queue.append(number)
        self._begun: dict[Queue, int] = defaultdict(int)
        self._ended: dict[Queue, int] = defaultdict(int)
        self._left: dict[Queue, set[tuple[str, int]]] = {}  # of the message at the head: ("to" or "from", rank)

    def caller_steps(self) -> bool:
        """Let every rank go on to the next call that it must wait for. Returns whether one rank did."""
        before = sum(self.at)
        for rank, moments in enumerate(self.todo):
            while self.at[rank] < len(moments):
                waits, number = moments[self.at[rank]]
                queue, place = self._queue(rank, number), self._place[rank][number]
                if waits and self._ended[queue] <= place:
                    break
                if not waits:
                    self._begun[queue] += 1
                self.at[rank] += 1
        return sum(self.at) > before

    def calls_end(self) -> bool:
        """End the calls that all their ranks have come to. Returns whether there was one."""
        moved = False
        waiting: set[tuple[int, int]] = set()  # groups and streams that are not all there: looked at once
        for queue in self._queues:
            while (call := self._head(queue)) is not None:
                alone = call.operation in MESSAGES
                if not alone and queue[1:] in waiting:
                    break
                if not self._ends(queue, call):
                    waiting.update(() if alone else [queue[1:]])
                    break
                moved = True
        return moved

    def named(self, rank: int) -> str:
        """The call that a rank waits for, in words."""
        number = self.todo[rank][self.at[rank]][1]
        call = self.what.calls[rank][number]
        group = self.what.groups[call.group].name
        return f"rank {rank} in {call.operation} of {call.bytes} bytes, call {number}, group {group!r}"

    def _queue(self, rank: int, number: int) -> Queue:
        call = self.what.calls[rank][number]
        return rank, call.group, call.stream

    def _head(self, queue: Queue) -> RecordedCall | None:
        """The call that a stream is at, if the rank has begun it."""
        at = self._ended[queue]
        return self.what.calls[queue[0]][self._queues[queue][at]] if at < self._begun[queue] else None

    def _ends(self, queue: Queue, call: RecordedCall) -> bool:
        """Go on with the call at the head of a queue. Returns whether there was anything to do."""
        rank, group, stream = queue
        ranks = self.what.groups[group].ranks
        if call.operation not in MESSAGES:
            queues = [(one, group, stream) for one in ranks]
            heads = [self._head(one) for one in queues]
            if any(head is None or head.operation in MESSAGES for head in heads):
                return False
            for one in queues:
                self._ended[one] += 1
            return True
        found = False
        for half in sorted(self._halves(queue, call)):
            other = (ranks[half[1]], group, stream)
            theirs = self._head(other)
            if theirs is None or theirs.operation not in MESSAGES:
                continue
            answer = ("from" if half[0] == "to" else "to", ranks.index(rank))
            if answer in self._halves(other, theirs):
                self._finish(queue, half)
                self._finish(other, answer)
                found = True
        return found

    def _halves(self, queue: Queue, call: RecordedCall) -> set[tuple[str, int]]:
        if queue not in self._left:
            both = (("to", call.sent), ("from", call.received))
            self._left[queue] = {(way, message[0]) for way, message in both if message is not None}
        return self._left[queue]

    def _finish(self, queue: Queue, half: tuple[str, int]) -> None:
        self._left[queue].discard(half)
        if not self._left[queue]:
            del self._left[queue]
            self._ended[queue] += 1


def _moments(calls: tuple[RecordedCall, ...]) -> list[tuple[bool, int]]:
    """The steps of a rank's caller, in a replay's order: (False, call) begins the call, (True, call) waits for it."""
    found = [(call.enqueue, 0, number) for number, call in enumerate(calls)]
    found += [
        (call.wait_start, 1, number) for number, call in enumerate(calls) if call.stream and call.wait_start is not None
    ]
    moments: list[tuple[bool, int]] = []
    for _, waits, number in sorted(found):
        moments.append((bool(waits), number))
        if not waits and not calls[number].stream:
            moments.append((True, number))
    waited = {number for waits, number in moments if waits}
    return moments + [(True, number) for number in range(len(calls)) if number not in waited]
