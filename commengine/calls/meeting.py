"""The ranks meet before they compare a call that is the first of its kind, so that one that knows it hears of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commengine.errors import CollectiveMismatch
from commengine.mpi import load_mpi

if TYPE_CHECKING:
    from commengine.communicator import Communicator

#: the length of a notice: no multiple of the size of any dtype that is differentiated
NOTICE_BYTES = 13


def meet(comm: Communicator, operation: str) -> None:
    """Tell every rank that this one makes a call that is its first of the kind, and will compare. Collective.

    The notices go the way of host tensors' messages without a stream. A rank to which the call is known compares
    nothing and sends data: this rank gets it in place of a notice, and that one gets a notice in place of data. Their
    lengths differ, so both raise an error, and neither waits for the other. operation: its name, for the error.
    Raises CollectiveMismatch.
    """
    mpi, wire = load_mpi(), comm._host.wire
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    came = bytearray(NOTICE_BYTES * len(others))
    places = [memoryview(came)[NOTICE_BYTES * n : NOTICE_BYTES * (n + 1)] for n in range(len(others))]
    problem: object = None
    with comm._calls.watching(operation, "life"):
        pairs = zip(places, others, strict=True)
        requests: list[Any] = [wire.calls.Irecv((place, mpi.BYTE), rank) for place, rank in pairs]
        statuses = [wire.status() for _ in (*others, *others)]
        requests += [wire.calls.Isend((bytes(NOTICE_BYTES), mpi.BYTE), rank) for rank in others]
        try:
            wire.waitall(requests, statuses)
            if any(status.Get_count(mpi.BYTE) != NOTICE_BYTES for status in statuses[: len(others)]):
                problem = "its message is shorter than a notice"
        except mpi.Exception as error:
            problem = error
    if problem is not None:
        raise CollectiveMismatch(
            f"rank {comm.rank} of group {comm.name!r} (size {comm.size}): the ranks disagree: this call of {operation} "
            f"is the first one with these arguments, and another rank makes a call that is known: {problem}"
        )
