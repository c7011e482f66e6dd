"""The ranks meet before they compare a call that is the first of its kind, so that one that knows it hears of them."""

from __future__ import annotations

from typing import Any

from commengine.errors import CollectiveMismatch
from commengine.mpi import load_mpi

#: a larger group does not meet, because each rank would send a notice to each other one. A rank that makes a new call
#: while another one makes a known one then waits for the timeout
MOST_RANKS = 32


def meet(comm: Any, operation: str) -> None:
    """Tell every rank that this one makes a call that is its first of the kind, and will compare. Collective.

    The notices are empty messages, and go the way of host tensors' messages without a stream. A rank to which the call
    is known compares nothing and sends data: this rank gets it in place of a notice, and that one gets a notice in
    place of data. Their lengths differ, so both raise an error, and neither waits for the other. comm: a Communicator.
    operation: its name, for the error. Raises CollectiveMismatch. Groups above MOST_RANKS do not meet, nor do
    checked ones, whose ranks compare each call.
    """
    if comm.checked or comm.size > MOST_RANKS:
        return
    mpi, wire = load_mpi(), comm._host.wire
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    problem: object = None
    with comm._calls.watching(operation, "life"):
        requests: list[Any] = [wire.calls.Irecv((bytearray(), mpi.BYTE), rank) for rank in others]
        requests += [wire.calls.Isend((b"", mpi.BYTE), rank) for rank in others]
        try:
            wire.waitall(requests, [wire.status() for _ in requests])
        except mpi.Exception as error:
            problem = error
    if problem is not None:
        raise CollectiveMismatch(
            f"rank {comm.rank} of group {comm.name!r} (size {comm.size}): the ranks disagree: this call of {operation} "
            f"is the first one with these arguments, and another rank makes a call that is known: {problem}"
        )
