"""The exceptions that commengine raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class GroupMember(Protocol):
    """This rank's place in a group of ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...


class CollectiveError(RuntimeError):
    """A collective was asked for something that it cannot do, or it failed.

    The message names the rank, the group and the operation. Shape, dtype, device, layout, root and reduction are
    checked on each rank by itself, and the error is raised before anything is sent.

    in_step: whether the communicator goes on, because the call began on no rank, or is over on all of them. Otherwise
        it takes no more calls on this rank, nor on the ranks that are told.
    on_all_ranks: whether every rank of the group raises it in this call.
    """

    in_step = True
    on_all_ranks = False


class CollectiveMismatch(CollectiveError):
    """The ranks of a group asked for different collectives.

    What the ranks make together (a Communicator, its parts, its streams, shared memory) is always compared. With
    ``Communicator(..., checked=True)`` every collective is compared, too, on all ranks of the group. Without it, only
    large host collectives are compared: those that go through a node's shared memory, and, once a group has tensors
    from `Communicator.empty`, those that are large enough to go there. These compare the ranks of one node.

    Raised on every rank that took part in the comparison; the message lists which rank asked for what. A collective
    that was not compared raises it on a rank where MPI tells that the sizes differ.
    """


class CollectiveTimeout(CollectiveError):
    """A collective did not finish within the communicator's ``timeout``."""

    in_step = False


class TransferError(Exception):
    """A transport could not move a tensor: a message had another length than expected, or NCCL refused the call.

    Internal: the Communicator turns it into a `CollectiveError` that names the rank, the group and the operation.
    """


class SettledError(TransferError):
    """A call failed on this rank, and the ranks are in step: it sent nothing, or all that was sent was received."""

    in_step = True


class StoppedError(TransferError):
    """Another rank of the group left a call in the middle, and takes part in no more. The message says why."""


class LaunchError(RuntimeError):
    """A job cannot begin as it was started.

    mpi4py finds no MPI, the launcher started another number of processes than MPI has ranks, or `launch.split_world`
    does not find the parts that the program needs.
    """


class UsageError(Exception):
    """Bad input that every rank knows about. Every rank must raise it.

    In `launch.run` rank 0 then prints the message, and all ranks exit with code 2.
    """


@contextmanager
def usage_errors(where: str) -> Iterator[None]:
    """Turn ValueError and OSError of code that reads what a user gave into UsageError, which begins with ``where``."""
    try:
        yield
    except (ValueError, OSError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        raise UsageError(f"{where}{said}") from error


def call_error(member: GroupMember, operation: str, problem: str) -> CollectiveError:
    """Return a CollectiveError that names the rank, the group and the operation."""
    return CollectiveError(f"rank {member.rank} of group {member.name!r} (size {member.size}): {operation}: {problem}")


def one_line(problem: object, most: int = 2000) -> str:
    """The message of an error in one line of at most about ``most`` characters: the middle of a longer one is left out.

    A message repeats what a user gave, which may be a file of megabytes.
    """
    text = str(problem)
    if len(text) > most:
        text = f"{text[: most * 3 // 4]} ... ({len(text) - most} more characters) ... {text[-most // 4 :]}"
    return " ".join(text.split())
