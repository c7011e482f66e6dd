"""The errors of calls that began: another thread is inside one, or a transport failed."""

from __future__ import annotations

import threading
from typing import Protocol

from commengine.errors import CollectiveError, CollectiveMismatch, GroupMember, TransferError, call_error
from commengine.mpi import load_mpi
from commengine.operations import OPERATIONS
from commengine.operations.checks import INT_MAX


class Said(threading.local):
    """What each thread says about its calls of one communicator (`Communicator.about`)."""

    words = ""


class Speaker(GroupMember, Protocol):
    """A communicator, and what is said about its calls."""

    said: Said


def busy_error(member: GroupMember, operation: str) -> CollectiveError:
    """Return the error of a call that begins while another thread is inside a call of the same communicator."""
    problem = "another thread is inside a call of this communicator; call its operations from one thread at a time"
    return call_error(member, operation, problem)


def transport_error(member: Speaker, operation: str, error: Exception, words: str | None = None) -> CollectiveError:
    """Return the error of a call in which a transport failed with ``error``.

    words: what was said about the call when it was enqueued; None: what this thread says now.
    """
    text = str(error)
    described = OPERATIONS.get(operation)
    words = member.said.words if words is None else words
    operation += f" ({words})" if words else ""
    if isinstance(error, OverflowError):
        return call_error(member, operation, f"this MPI counts at most {INT_MAX} elements in one call ({text})")
    if described is None or described.pairwise or isinstance(error, TransferError):
        return call_error(member, operation, text)
    mpi, found = load_mpi(), getattr(error, "Get_error_class", int)()
    # MPICH's broadcast compares sizes by itself, and has no error class of its own for the answer.
    if found not in (mpi.ERR_TRUNCATE, mpi.ERR_IN_STATUS) and "sizes do not match" not in text:
        return call_error(member, operation, text)
    problem = call_error(
        member,
        operation,
        "MPI moved another number of bytes than this rank expected, because the ranks gave tensors of different sizes "
        f"or called different operations; Communicator(..., checked=True) says which ({text.splitlines()[-1].strip()})",
    )
    return CollectiveMismatch(str(problem))
