"""Whether a replay would come to its end: no ranks wait for each other for ever.

Our own recordings are of runs that ended. Another tool's trace may be made by hand, and its runtime may let a send end
before the receive begins, which a replay does not.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator

from bench.step_study.recording import MESSAGES, RecordedCall, Recording, moments
from commengine import UsageError

_Queue = tuple[int, int]  # a group, and a stream of it
_Meeting = tuple[_Queue, tuple[int, int] | None, int]  # with its message or None, and how many were before it


def check_ends(what: Recording) -> None:
    """Raise UsageError that names two calls if the ranks would wait for each other in a replay.

    The replay is played without times. A collective ends when all ranks of its group have come to it, and a message
    when both ranks have. Of a call on a stream, a rank waits only where the recording does. The calls of a stream run
    one after the other, but for streams of messages alone: no message waits for another one there (`replaying`).
    """
    steps = [deque(_steps(calls)) for calls in what.calls]
    queues = {(call.group, call.stream) for calls in what.calls for call in calls if call.stream}
    free = {queue for queue in queues if what.only_messages(*queue)}
    begun: list[defaultdict[_Queue, deque[tuple[int, list[_Meeting]]]]] = [defaultdict(deque) for _ in steps]
    counts: list[Counter[tuple[_Queue, tuple[int, int] | None]]] = [Counter() for _ in steps]
    came: defaultdict[_Meeting, set[int]] = defaultdict(set)
    ended: set[tuple[int, int]] = set()
    moves = True
    while moves:
        moves = False
        for rank, left in enumerate(steps):
            while left and (not left[0][0] or (rank, left[0][1]) in ended):
                waits, number = left.popleft()
                moves = True
                if waits:
                    continue
                call = what.calls[rank][number]
                queue, needs = (call.group, call.stream), []
                for message in _messages(call, what.groups[call.group].ranks.index(rank)):
                    needs.append((queue, message, counts[rank][queue, message]))
                    counts[rank][queue, message] += 1
                begun[rank][queue].append((number, needs))
            for queue, calls in begun[rank].items():
                for number, needs in list(calls if queue in free else itertools.islice(calls, 1)):
                    for one in needs:
                        came[one].add(rank)
                    if all(len(came[one]) == (2 if one[1] else len(what.groups[queue[0]].ranks)) for one in needs):
                        calls.remove((number, needs))
                        ended.add((rank, number))
                        moves = True
    stuck = [_named(what, rank, left[0][1]) for rank, left in enumerate(steps) if left]
    if stuck:
        raise UsageError(f"a replay would not end, because ranks wait for each other: {', '.join(stuck[:2])}")


def _messages(call: RecordedCall, me: int) -> Iterator[tuple[int, int] | None]:
    """The messages of the call of rank ``me`` of its group, as (from, to) in the group; None for a collective."""
    if call.operation not in MESSAGES:
        yield None
    if call.sent is not None:
        yield me, call.sent[0]
    if call.received is not None:
        yield call.received[0], me


def _named(what: Recording, rank: int, number: int) -> str:
    call = what.calls[rank][number]
    group = what.groups[call.group].name
    return f"rank {rank} in {call.operation} of {call.bytes} bytes, call {number}, group {group!r}"


def _steps(calls: tuple[RecordedCall, ...]) -> list[tuple[bool, int]]:
    """The steps of a rank's caller, in a replay's order: (False, call) begins the call, (True, call) waits for it."""
    found: list[tuple[bool, int]] = []
    for waits, number in moments(calls):
        found.append((waits, number))
        if not waits and not calls[number].stream:
            found.append((True, number))
    waited = {number for waits, number in found if waits}
    return found + [(True, number) for number in range(len(calls)) if number not in waited]
