"""The errors of calls that began: another thread is inside one, a transport failed, or one was left in the middle."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from commengine.errors import (
    CollectiveError,
    CollectiveMismatch,
    GroupMember,
    StoppedError,
    TransferError,
    call_error,
    one_line,
)
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


def reason_of(member: GroupMember, operation: str, error: BaseException) -> str:
    """Return why a communicator takes no more calls after ``error`` in one of them."""
    if isinstance(error, CollectiveError) and error.__cause__ is not None:
        error = error.__cause__  # the failure of the transport
    if isinstance(error, StoppedError):  # the rank that left its call has told
        return str(error)
    said = one_line(error, 120)
    what = type(error).__name__ + (f": {said}" if said else "")
    return f"rank {member.rank} left {operation} at {time.strftime('%H:%M:%S')} with {what}"


def transport_error(member: Speaker, operation: str, error: Exception, words: str | None = None) -> CollectiveError:
    """Return the error of a call in which a transport failed with ``error``.

    words: what was said about the call when it was enqueued; None: what this thread says now.
    """
    made = _described(member, operation, error, words)
    made.in_step = getattr(error, "in_step", False)
    return made


def _described(member: Speaker, operation: str, error: Exception, words: str | None) -> CollectiveError:
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
