"""The messages of a training step's collectives, by rank and step: rings for long ones, trees for short ones.

A rank sends the messages of a step when the step begins, and the next step begins when the messages that it waits for
have arrived. The ring passes the ranks in the order of the group, so between nodes it passes each adapter once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MessageStep:
    """Messages that a member sends, as (member, bytes), and the members from which it waits for a message."""

    send: list[tuple[int, float]] = field(default_factory=list)
    receive: list[int] = field(default_factory=list)


Schedule = list[list[MessageStep]]
#: the operation of a message between two ranks
MESSAGE = "message"


def schedule(operation: str, nbytes: float, members: int, short: int, nodes: Sequence[int] | None = None) -> Schedule:
    """The steps of each member. nbytes: as nccl-tests count: of the larger of a member's two buffers.

    nodes: of each member, if long all-reduces go in two levels; one ring passes all members otherwise. Raises
    ValueError for an operation that such steps do not have.
    """
    if members == 1:
        return [[]]
    if operation == MESSAGE:  # from the first member, which goes on at once, to the second one
        return [[MessageStep([(1, nbytes)])], [MessageStep(receive=[0])]]
    if operation == "barrier":
        return _doubling(members, 8)
    if operation == "all_reduce":
        if nbytes < short:
            return _doubling(members, nbytes)
        if nodes is not None and (each := _members_of_a_node(nodes)) > 1:
            return _two_levels(members, nbytes, each)
        return _ring(members, nbytes / members, 2 * (members - 1))
    if operation in ("reduce_scatter", "all_gather"):
        return _ring(members, nbytes / members, members - 1)
    if operation == "all_to_all":  # one partner after another
        return [
            [
                MessageStep([((me + far) % members, nbytes / members)], [(me - far) % members])
                for far in range(1, members)
            ]
            for me in range(members)
        ]
    if operation == "sendrecv":  # around a ring
        return _ring(members, nbytes, 1)
    raise ValueError(f"the emulator does not run {operation}")


def _ring(members: int, part: float, steps: int) -> Schedule:
    return [[MessageStep([((me + 1) % members, part)], [(me - 1) % members])] * steps for me in range(members)]


def _members_of_a_node(nodes: Sequence[int]) -> int:
    """The members on each node, if there are several nodes and as many members on each; else 0."""
    counts = set(Counter(nodes).values())
    return counts.pop() if len(counts) == 1 and nodes[0] != nodes[-1] else 0


def _two_levels(members: int, nbytes: float, each: int) -> Schedule:
    """Reduce-scatter inside each node, all-reduce of a part between the nodes, all-gather inside each node."""
    nodes = members // each
    inside, between = _ring(each, nbytes / each, each - 1), _ring(nodes, nbytes / members, 2 * (nodes - 1))
    found: Schedule = []
    for me in range(members):
        first, place, node = me - me % each, me % each, me // each
        parts = ((inside[place], first, 1), (between[node], place, each), (inside[place], first, 1))
        found.append([_placed(step, start, stride) for steps, start, stride in parts for step in steps])
    return found


def _placed(step: MessageStep, first: int, stride: int) -> MessageStep:
    """The step of a smaller group, with its members at ``first``, ``first`` + ``stride``, and so on."""
    return MessageStep(
        [(first + stride * one, nbytes) for one, nbytes in step.send], [first + stride * one for one in step.receive]
    )


def _doubling(members: int, nbytes: float) -> Schedule:
    """Recursive doubling. Members beyond a power of two give their part to another first, and get the result last."""
    power = 1 << (members.bit_length() - 1)
    extra = members - power
    found: Schedule = []
    for me in range(members):
        if me >= power:
            found.append([MessageStep([(me - power, nbytes)]), MessageStep(receive=[me - power])])
            continue
        steps = [MessageStep(receive=[me + power])] if me < extra else []
        distance = 1
        while distance < power:
            steps.append(MessageStep([(me ^ distance, nbytes)], [me ^ distance]))
            distance *= 2
        if me < extra:
            steps.append(MessageStep([(me + power, nbytes)]))
        found.append(steps)
    return found
