"""The ranks of a group compare what they are about to do, or tell each other what went wrong.

`agree` runs before each collective of a ``Communicator(..., checked=True)``, and `compare_words` where ranks make
something together that must be equal. `raise_together` is for set-up steps that
can fail on one rank while the others wait for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .errors import CollectiveError, CollectiveMismatch
from .mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

#: bytes of one rank's description. A longer description (a shape of very many dimensions) ends in a hash of the whole
RECORD_BYTES = 256

#: bytes of one rank's problem that the other ranks are told
PROBLEM_BYTES = 1024


class GroupMember(Protocol):
    """This rank's place in a group of ranks."""

    rank: int
    size: int
    name: str


class GatheringMember(GroupMember, Protocol):
    """A group that gathers host tensors: a Communicator."""

    def all_gather(self, output: Tensor, input: Tensor) -> object:
        """Give every rank the ``input`` of all ranks, along dim 0 of ``output``."""


class Described(Protocol):
    """A tensor, or only its shape, dtype and place."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def is_cpu(self) -> bool: ...


def agree(member: GroupMember, all_gather: Callable[[Tensor, Tensor], object], asked: str) -> None:
    """Exchange what each rank is about to do; raise `CollectiveMismatch` on every rank when the ranks differ.

    asked: this rank's call in one line, from `describe`. all_gather: gathers host tensors over the group, outside of
    any stream, also for a collective on a stream: so a rank that forgot its stream is found too. Collective.
    """
    mine = torch.zeros(RECORD_BYTES, dtype=torch.uint8, device="cpu")
    encoded = asked.encode()
    if len(encoded) > RECORD_BYTES:
        digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
        encoded = encoded[: RECORD_BYTES - 20] + f"... {digest}".encode()
    mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    everybody = torch.empty((member.size, RECORD_BYTES), dtype=torch.uint8, device="cpu")
    all_gather(everybody, mine)
    if bool((everybody == mine).all()):
        return
    ranks: dict[str, list[int]] = {}
    for rank, record in enumerate(everybody):
        ranks.setdefault(bytes(record.tolist()).rstrip(b"\0").decode(errors="replace"), []).append(rank)
    asks = "; ".join(f"rank{'s' * (len(who) > 1)} {_listed(who)} asked for {what}" for what, who in ranks.items())
    raise CollectiveMismatch(
        f"rank {member.rank} of group {member.name!r} (size {member.size}): the ranks disagree: {asks}"
    )


def compare_words(comm: GatheringMember, words: str) -> None:
    """Raise `CollectiveMismatch` on every rank of ``comm`` unless all ranks give the same words. Collective."""
    agree(comm, lambda everybody, mine: comm.all_gather(everybody.view(-1), mine), words)


def describe(
    operation: str, tensor: Described | None, redop: str | None = None, root: int | None = None, stream: int = 0
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


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return shown if len(ranks) <= 16 else f"{shown} and {len(ranks) - 16} more"


def raise_together(comm: MPI.Intracomm, problem: str | None) -> None:
    """Exchange the ranks' problems; raise one `CollectiveError` on every rank if any rank has a problem.

    problem: what went wrong on this rank, or None. Collective over ``comm``, and a barrier: no rank returns before
    every rank has called it.
    """
    mine = bytearray(PROBLEM_BYTES)
    encoded = (problem or "").encode()[:PROBLEM_BYTES]
    mine[: len(encoded)] = encoded
    everybody = bytearray(PROBLEM_BYTES * comm.size)
    byte = load_mpi().BYTE
    comm.Allgather([mine, byte], [everybody, byte])
    ranks: dict[str, list[int]] = {}
    for rank in range(comm.size):
        said = everybody[rank * PROBLEM_BYTES : (rank + 1) * PROBLEM_BYTES].rstrip(b"\0").decode(errors="replace")
        if said:
            ranks.setdefault(said, []).append(rank)
    if not ranks:
        return
    if list(map(len, ranks.values())) == [comm.size]:
        raise CollectiveError(next(iter(ranks)))
    told = (f"rank{'s' * (len(who) > 1)} {_listed(who)}: {said}" for said, who in ranks.items())
    raise CollectiveError("; ".join(told))
