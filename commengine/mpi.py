"""mpi4py, imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI


def load_mpi() -> Any:
    """``mpi4py.MPI``: importing it initialises MPI, and importing commengine must not."""
    from mpi4py import MPI

    return MPI


def ranks_in(comm: MPI.Comm, other: MPI.Comm) -> list[int]:
    """The rank in ``other`` of each of ``comm``'s ranks, in order. Of this rank alone."""
    mine, theirs = comm.Get_group(), other.Get_group()
    ranks = list(mine.Translate_ranks(None, theirs))
    mine.Free()
    theirs.Free()
    return ranks
