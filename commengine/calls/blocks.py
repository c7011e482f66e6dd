"""The calls of a coalesce() block: the rule for their tensors, and their order."""

from __future__ import annotations

from commengine.agreement import describe
from commengine.errors import CollectiveError, GroupMember, call_error
from commengine.operations.exchange import exchange_of
from commengine.operations.operation import Call


def check_independent(member: GroupMember, calls: list[Call], operation: str = "coalesce") -> None:
    """Check that no call of a block writes memory that another call of the block reads or writes.

    A block's messages are one exchange, and a device's calls one launch: they have no order.
    """
    spans = sorted(
        (start, end, number, written)
        for number, call in enumerate(calls)
        for start, end, written in call.operation.spans(call.args)
    )
    read = wrote = (0, 0)  # how far memory was touched so far, and the number of the call. One call's spans are apart
    for start, end, number, written in spans:
        last = wrote if start < wrote[0] else read
        if start < wrote[0] or (written and start < read[0]):
            raise _dependent(member, operation, calls, *sorted((last[1], number)))
        if written:
            wrote = max(wrote, (end, number))
        else:
            read = max(read, (end, number))


def _dependent(member: GroupMember, operation: str, calls: list[Call], first: int, last: int) -> CollectiveError:
    said = " and ".join(
        describe(one.name, one.tensor, one.redop, None if one.peers else one.root)
        for one in (calls[first], calls[last])
    )
    parts, whole, one = ("calls", "block", "a") if operation == "coalesce" else ("messages", "exchange", "an")
    problem = (
        f"{parts} {first + 1} and {last + 1} of the {whole}, {said}, touch the same memory, and one of them writes it"
    )
    remedy = f"{one} {whole} has no order; give each a buffer of its own (sendrecv takes two), or make two {whole}s"
    return call_error(member, operation, f"{problem}: {remedy}")


def exchanges_first(calls: list[Call]) -> list[Call]:
    """Return the calls of a block in the order in which they run.

    All sends and receives become one exchange, which comes first; the collectives follow in their order.
    """
    messages = [call for call in calls if call.operation.pairwise]
    collectives = [call for call in calls if not call.operation.pairwise]
    return [exchange_of(messages), *collectives] if messages else collectives
