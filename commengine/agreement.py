"""The ranks of a group compare what they are about to do, or tell each other what went wrong.

`agree` compares the ranks' words in one all-reduce of 16 bytes, and gathers the words only if they differ. It runs
where a Communicator, a split or shared memory is made, before each collective of a ``Communicator(..., checked=True)``,
and in `Communicator.compare`. `raise_together` is for set-up steps that can fail on one rank while the others wait
for it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .errors import CollectiveError, CollectiveMismatch, GroupMember, call_error
from .mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

#: bytes of one rank's words that the other ranks are told. Longer words end in a hash of the whole
RECORD_BYTES = 1024

#: begins the words of a rank that has a problem
_PROBLEM = "\1"


class Shown(NamedTuple):
    """The shape, dtype and place of a tensor, without the tensor."""

    shape: torch.Size
    dtype: torch.dtype
    is_cpu: bool


def agree(member: GroupMember, calls: Any, asked: str, problem: str | None = None) -> None:
    """Compare what each rank is about to do; raise on every rank when the ranks differ, or one cannot do it.

    asked: this rank's call, as from `describe`. Of a call in several lines, its name and its arguments, the message
    shows the lines that differ. problem: why this rank cannot do it, or None.
    calls: has the blocking calls ``Allreduce`` and ``Allgather`` of the group's MPI communicator: the communicator
    itself, or `commengine.host.polling.PollingCalls`. They run outside of any stream, also for a collective on a
    stream: so a rank that forgot its stream is found too.

    Collective, and a barrier: no rank returns before every rank has called it. Raises `CollectiveError` with the
    problems if there is one, and otherwise `CollectiveMismatch`.
    """
    mpi = load_mpi()
    words = asked if problem is None else _PROBLEM + problem
    encoded = words.encode()
    digest = hashlib.blake2b(encoded, digest_size=8).digest()
    number = int.from_bytes(digest, "big") >> 1  # 63 bits, so that it can be negated
    ends = array("q", (number, -number))
    calls.Allreduce(mpi.IN_PLACE, (ends, mpi.INT64_T), mpi.MIN)
    if ends[0] == -ends[1]:
        if problem is not None:
            raise _of_all(CollectiveError(problem))
        return
    if len(encoded) > RECORD_BYTES:
        encoded = encoded[: RECORD_BYTES - 20] + f"... {digest.hex()}".encode()
    everybody = bytearray(RECORD_BYTES * member.size)
    calls.Allgather((bytearray(encoded.ljust(RECORD_BYTES, b"\0")), mpi.BYTE), (everybody, mpi.BYTE))
    ranks: dict[str, list[int]] = {}
    for rank in range(member.size):
        record = everybody[rank * RECORD_BYTES : (rank + 1) * RECORD_BYTES]
        ranks.setdefault(record.rstrip(b"\0").decode(errors="replace"), []).append(rank)
    problems = [(who, said.removeprefix(_PROBLEM)) for said, who in ranks.items() if said.startswith(_PROBLEM)]
    if problems:
        raise _of_all(CollectiveError("; ".join(f"{ranks_named(who)}: {said}" for who, said in problems)))
    common = set.intersection(*(set(words.split("\n")[1:]) for words in ranks))
    calls_of = [(who, _call(said, common)) for said, who in ranks.items()]
    raise _of_all(disagreement(member, calls_of))


def _of_all(error: CollectiveError) -> CollectiveError:
    error.on_all_ranks = True
    return error


def integers(member: GroupMember, operation: str, numbers: Sequence[int]) -> Sequence[int]:
    """Return ``numbers`` as they travel. Raises CollectiveError for one that is no integer below 2^63 in size."""
    try:
        sent = array("q", numbers)
        if -(1 << 63) in sent:  # also those of the other sign travel
            raise OverflowError("2^63 has more than 63 bits")
    except (OverflowError, TypeError) as error:
        raise call_error(member, operation, f"{numbers!r:.80} must be integers below 2^63 in size: {error}") from error
    return sent


def extremes(calls: Any, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
    """`Communicator.extremes`. calls: as of `agree`."""
    mpi, count = load_mpi(), len(numbers)
    ends = array("q", (*numbers, *(-number for number in numbers)))
    calls.Allreduce(mpi.IN_PLACE, (ends, mpi.INT64_T), mpi.MIN)
    return ends[:count].tolist(), [-end for end in ends[count:]]


def each_number(calls: Any, number: int, size: int) -> list[int]:
    """`Communicator.each_number`. calls: as of `agree`."""
    mpi, everybody = load_mpi(), array("q", bytes(8 * size))
    calls.Allgather((array("q", (number,)), mpi.INT64_T), (everybody, mpi.INT64_T))
    return everybody.tolist()


def disagreement(
    member: GroupMember, asked: Sequence[tuple[list[int], str]], fault: str = "the ranks disagree"
) -> CollectiveMismatch:
    """Return the error of ranks that give different calls.

    member: this rank's place in the group. asked: ranks, and what these asked for.
    """
    asks = "; ".join(f"{ranks_named(who)} asked for {what}" for who, what in asked)
    return CollectiveMismatch(f"rank {member.rank} of group {member.name!r} (size {member.size}): {fault}: {asks}")


def _call(words: str, common: Iterable[str]) -> str:
    """Return the words of one call in one line, without the arguments that all ranks gave."""
    name, *arguments = words.split("\n")
    shown = ", ".join(one for one in arguments if one not in common)
    return f"{name}({shown})" if shown else name


def describe(
    operation: str, tensor: Tensor | Shown | None, redop: str | None = None, root: int | None = None, stream: int = 0
) -> str:
    """Describe one call in one line, such as ``all_reduce(float32 [4, 8], op=sum)``.

    stream: the number of the call's stream; 0 for a call without a stream.
    """
    parts = []
    if tensor is not None:
        place = "" if tensor.is_cpu else "cuda "
        parts.append(f"{str(tensor.dtype).removeprefix('torch.')} {place}{list(tensor.shape)}")
    if redop is not None:
        parts.append(f"op={redop}")
    if root is not None:
        parts.append(f"root={root}")
    if stream:
        parts.append(f"stream {stream}")
    return f"{operation}({', '.join(parts)})"


def ranks_named(ranks: Sequence[int]) -> str:
    """Return the first 16 of ``ranks`` in words, and how many more there are."""
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:16]))}{more}"


def raise_together(comm: MPI.Intracomm, problem: str | None) -> None:
    """Exchange the ranks' problems; raise one `CollectiveError` on every rank if any rank has a problem.

    problem: what went wrong on this rank, or None. Collective over ``comm``, and a barrier, as `agree` is. It blocks
    inside MPI: a program that has a Communicator calls `Communicator.compare`, which has the Communicator's timeout.
    """
    agree(comm, comm, "set-up", problem)
