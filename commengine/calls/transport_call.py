"""A call of a transport's method; the rule for the calls of a coalesce() block, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from commengine.agreement import GroupMember, describe
from commengine.operations import OPERATIONS

from .checks import call_error

#: the arguments into which an operation writes; of "send" alone, "tensor" is only read
_WRITTEN = ("tensor", "output", "received")


class TransportCall(NamedTuple):
    """A call of a transport's method, and what comparisons, traces and reports say about it.

    name, args: the method and its arguments. tensor: the tensor that stands for the call, None for a barrier. redop:
    the reduction. root: the root, or the peer of a send or receive. nbytes: the size of the call (see
    `commengine.operations`). peers: the ranks that a message goes to and comes from.
    """

    name: str
    args: tuple[Any, ...]
    tensor: Tensor | None
    redop: str | None
    root: int | None
    nbytes: int
    peers: tuple[int, ...]

    @classmethod
    def of(cls, name: str, args: tuple[Any, ...], ranks: int) -> TransportCall:
        """Return the call of the method ``name``, described by the table of operations. ranks: the group's size."""
        operation = OPERATIONS[name]
        named = dict(zip(operation.arguments, args, strict=True))
        tensor = None if operation.counted is None else named[operation.counted]
        peers = tuple(named[argument] for argument in ("dst", "src") if argument in named)
        root = named.get("root", peers[0] if peers else None)
        nbytes = 0 if tensor is None else operation.nbytes(tensor.nbytes, ranks)
        return cls(name, args, tensor, named.get("op"), root, nbytes, peers)

    def spans(self) -> Iterator[tuple[int, int, bool]]:
        """Yield the memory of each tensor of the call: its begin, its end, and whether the call writes it.

        It is the same on all ranks whose tensors lie alike: a rooted operation counts as writing on every rank, and a
        reduce-scatter in place, which writes other rows on each rank, as writing its whole input.
        """
        found = [
            (value.data_ptr(), value.data_ptr() + value.nbytes, argument in _WRITTEN and self.name != "send")
            for argument, value in zip(OPERATIONS[self.name].arguments, self.args, strict=True)
            if isinstance(value, Tensor) and value.nbytes
        ]
        together = len(found) == 2 and found[0][0] < found[1][1] and found[1][0] < found[0][1]
        for start, end, written in found:
            yield start, end, written or together


def check_independent(member: GroupMember, calls: list[TransportCall]) -> None:
    """Check that no call of a block writes memory that another call of the block reads or writes.

    A block's messages are one exchange, and a device's calls one launch: they have no order.
    """
    spans = sorted((*span, number) for number, call in enumerate(calls) for span in call.spans())
    # Of the spans so far, read and written: the end that is furthest, its call, and the furthest end of other calls. A
    # span overlaps one of another call exactly if it begins before the furthest end of other calls than its own.
    furthest = {False: (0, -1, 0, -1), True: (0, -1, 0, -1)}
    for start, end, written, number in spans:
        for kind in (False, True) if written else (True,):
            until, call, second, its_call = furthest[kind]
            if call == number:
                until, call = second, its_call
            if start < until:
                first, last = sorted((call, number))
                said = " and ".join(
                    describe(one.name, one.tensor, one.redop, None if one.peers else one.root)
                    for one in (calls[first], calls[last])
                )
                problem = (
                    f"calls {first + 1} and {last + 1} of the block, {said}, touch the same memory, and one of them"
                )
                remedy = "a block has no order; give each a buffer of its own (sendrecv takes two), or make two blocks"
                raise call_error(member, "coalesce", f"{problem} writes it: {remedy}")
        until, call, second, its_call = furthest[written]
        if call == number:
            furthest[written] = max(until, end), number, second, its_call
        elif end > until:
            furthest[written] = end, number, until, call
        elif end > second:
            furthest[written] = until, call, end, number


def exchanges_first(calls: list[TransportCall]) -> list[TransportCall]:
    """Return the calls of a block in the order in which they run.

    All sends and receives become one exchange, which comes first; the collectives follow in their order.
    """
    transfers: list[tuple[str, Tensor, int]] = []
    collectives = []
    for call in calls:
        if call.name == "sendrecv":
            transfers += [("send", *call.args[:2]), ("recv", *call.args[2:])]
        elif call.name in ("send", "recv"):
            transfers.append((call.name, *call.args))
        else:
            collectives.append(call)
    if not transfers:
        return collectives
    peers = tuple(dict.fromkeys(peer for *_, peer in transfers))
    # A device tensor stands for the exchange if there is one: its transport also takes host tensors, the host transport
    # takes no device tensors.
    stands = next((tensor for _, tensor, _ in transfers if not tensor.is_cpu), transfers[0][1])
    nbytes = sum(part.nbytes for _, part, _ in transfers)
    return [TransportCall("exchange", (transfers,), stands, None, None, nbytes, peers), *collectives]
