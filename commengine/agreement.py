"""The ranks of a group agree: on each collective before it starts (``Communicator(..., checked=True)``), or to fail."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import CollectiveError, CollectiveMismatch
from .mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

    from .calls.dispatch import Runs
    from .stream import Stream

#: bytes of one rank's description; of a longer one (a shape of very many dimensions) the end is a hash of the whole
RECORD_BYTES = 256

#: bytes of one rank's problem that the others are told
PROBLEM_BYTES = 1024


def agree(
    comm: Runs,
    operation: str,
    tensor: Tensor | None,
    redop: str | None,
    root: int | None,
    stream: Stream | None,
) -> None:
    """Exchange what each rank is about to do; raise `CollectiveMismatch` on every rank when they differ.

    Runs on the communicator itself, also for a collective on a stream: so a rank that forgot its stream is found
    too. Collective over ``comm``.
    """
    asked = describe(operation, tensor, redop, root, stream)
    mine = torch.zeros(RECORD_BYTES, dtype=torch.uint8, device="cpu")
    encoded = asked.encode()
    if len(encoded) > RECORD_BYTES:
        digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
        encoded = encoded[: RECORD_BYTES - 20] + f"... {digest}".encode()
    mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    everybody = torch.empty((comm.size, RECORD_BYTES), dtype=torch.uint8, device="cpu")
    comm._host.all_gather(everybody, mine)
    if bool((everybody == mine).all()):
        return
    ranks: dict[str, list[int]] = {}
    for rank, record in enumerate(everybody):
        ranks.setdefault(bytes(record.tolist()).rstrip(b"\0").decode(errors="replace"), []).append(rank)
    asks = "; ".join(f"rank{'s' * (len(who) > 1)} {_listed(who)} asked for {what}" for what, who in ranks.items())
    raise CollectiveMismatch(f"rank {comm.rank} of group {comm.name!r} (size {comm.size}): the ranks disagree: {asks}")


def describe(operation: str, tensor: Tensor | None, redop: str | None, root: int | None, stream: Stream | None) -> str:
    """One call in one line, such as ``all_reduce(float32 [4, 8], op=sum)``."""
    parts = []
    if tensor is not None:
        place = "" if tensor.is_cpu else "cuda "
        parts.append(f"{str(tensor.dtype).removeprefix('torch.')} {place}{list(tensor.shape)}")
    if redop is not None:
        parts.append(f"op={redop}")
    if root is not None:
        parts.append(f"root={root}")
    if stream is not None:
        parts.append(f"stream {stream.index}")
    return f"{operation}({', '.join(parts)})"


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return shown if len(ranks) <= 16 else f"{shown} and {len(ranks) - 16} more"


def raise_together(comm: MPI.Intracomm, problem: str | None) -> None:
    """Exchange what went wrong on each rank; raise one `CollectiveError` on every rank if anything did.

    Collective over ``comm``. It ends when every rank is here: a barrier.
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
