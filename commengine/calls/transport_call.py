"""A call of a transport's method; the rule for the calls of a coalesce() block, and their order."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from commengine.agreement import GroupMember, describe
from commengine.errors import CollectiveError
from commengine.operations import OPERATIONS

from .checks import call_error

#: by operation: the places of the tensors among its arguments, and whether it writes them
_TENSORS = {
    name: tuple(
        (place, argument in ("tensor", "output", "received") and name != "send")
        for place, argument in enumerate(operation.arguments)
        if argument in ("tensor", "output", "input", "sent", "received")
    )
    for name, operation in OPERATIONS.items()
}


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

    def spans(self, number: int) -> list[tuple[int, int, int, bool]]:
        """Return the memory of the call's tensors: its begin, its end, ``number``, and whether the call writes it.

        It is the same on all ranks whose tensors lie alike: a rooted operation counts as writing on every rank, and a
        reduce-scatter in place, which writes other rows on each rank, as writing its whole input.
        """
        found = []
        for place, written in _TENSORS[self.name]:
            tensor = self.args[place]
            nbytes = 0 if tensor is None else tensor.nbytes
            if nbytes:
                start = tensor.data_ptr()
                found.append((start, start + nbytes, number, written))
        if len(found) == 2:
            (start, end, *_), (other, its_end, *_) = found
            if start < its_end and other < end:
                return [(min(start, other), max(end, its_end), number, True)]
        return found


def check_independent(member: GroupMember, calls: list[TransportCall]) -> None:
    """Check that no call of a block writes memory that another call of the block reads or writes.

    A block's messages are one exchange, and a device's calls one launch: they have no order.
    """
    spans = [span for number, call in enumerate(calls) for span in call.spans(number)]
    spans.sort()
    read_until = written_until = 0  # of the spans so far. Those of one call have no memory in common.
    for span in spans:
        start, end, _, written = span
        if start < written_until or (written and start < read_until):
            raise _dependent(member, calls, spans, span)
        if written:
            written_until = max(written_until, end)
        else:
            read_until = max(read_until, end)


def _dependent(
    member: GroupMember,
    calls: list[TransportCall],
    spans: list[tuple[int, int, int, bool]],
    late: tuple[int, int, int, bool],
) -> CollectiveError:
    """Return the error of a block in which the call of the span ``late`` and that of an earlier one depend."""
    start, _, number, written = late
    other = next(span[2] for span in spans if start < span[1] and (written or span[3]))
    first, last = sorted((other, number))
    said = " and ".join(
        describe(one.name, one.tensor, one.redop, None if one.peers else one.root)
        for one in (calls[first], calls[last])
    )
    problem = f"calls {first + 1} and {last + 1} of the block, {said}, touch the same memory, and one of them writes it"
    remedy = "a block has no order; give each a buffer of its own (sendrecv takes two), or make two blocks"
    return call_error(member, "coalesce", f"{problem}: {remedy}")


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
