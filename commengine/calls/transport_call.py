"""A call of a transport's method, and the order of the calls of a coalesce() block."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from commengine.operations import OPERATIONS


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
