"""mpi4py, imported on first use, and one question about MPI groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI


def load_mpi() -> Any:
    """Return ``mpi4py.MPI``. Importing it initialises MPI, which importing commengine must not do."""
    from mpi4py import MPI

    return MPI


def ranks_in(comm: MPI.Comm, other: MPI.Comm) -> list[int]:
    """Return the rank in ``other`` of each rank of ``comm``, in the order of ``comm``. Not collective."""
    mine, theirs = comm.Get_group(), other.Get_group()
    # mpi4py 3.1 has a class method of two groups, and takes no None for all ranks; a call on the class serves both.
    ranks = list(load_mpi().Group.Translate_ranks(mine, list(range(mine.size)), theirs))
    mine.Free()
    theirs.Free()
    return ranks
