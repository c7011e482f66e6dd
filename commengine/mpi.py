"""mpi4py, imported on first use; communicators of MPI and their limit; a barrier that sleeps; MPI groups."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

from .errors import SettledError

if TYPE_CHECKING:
    from mpi4py import MPI


#: in MPICH's errors where no number of a communicator is left, or none that is free on all ranks: a rank that stopped
#: keeps its communicators
NONE_LEFT = ("Too many communicators", "Cannot allocate context ID because of fragmentation")


def load_mpi() -> Any:
    """Return ``mpi4py.MPI``. Importing it initialises MPI, which importing commengine must not do."""
    from mpi4py import MPI

    return MPI


def reduced(comm: MPI.Comm, value: float, op: MPI.Op) -> Any:
    """Return one number of every rank, reduced, on all ranks. A whole one stays so. Collective over ``comm``.

    mpi4py's allreduce of objects duplicates the communicator at its first call, and keeps Python's lock meanwhile:
    where a rank does not come, no watcher could say so.
    """
    whole = isinstance(value, int)
    number = array("q" if whole else "d", [value])
    comm.Allreduce(load_mpi().IN_PLACE, [number, load_mpi().INT64_T if whole else load_mpi().DOUBLE], op)
    return number[0]


def ranks_in(comm: MPI.Comm, other: MPI.Comm) -> list[int]:
    """Return the rank in ``other`` of each rank of ``comm``, in the order of ``comm``. Not collective."""
    mine, theirs = comm.Get_group(), other.Get_group()
    # mpi4py 3.1 has a class method of two groups, and takes no None for all ranks; a call on the class serves both.
    ranks = list(load_mpi().Group.Translate_ranks(mine, list(range(mine.size)), theirs))
    mine.Free()
    theirs.Free()
    return ranks


def world_ranks_of(comm: MPI.Comm) -> list[int]:
    """Return the ranks that messages name: those in MPI.COMM_WORLD, or in ``comm`` where some were spawned apart.

    Not collective.
    """
    ranks = ranks_in(comm, load_mpi().COMM_WORLD)
    return list(range(comm.size)) if load_mpi().UNDEFINED in ranks else ranks


def sleep_until_all(comm: MPI.Comm, nap: float, look: Callable[[], object] | None = None) -> None:
    """A barrier in which the ranks that wait leave their cores to others. Collective over ``comm``.

    nap: seconds that a rank sleeps between two looks. look: called after each nap.
    """
    everybody = comm.Ibarrier()
    while not everybody.Test():
        time.sleep(nap)
        if look is not None:
            look()


class OwnsCommunicators:
    """What has communicators of MPI: a ``with`` block closes it at its end, and a copied layer keeps it as it is."""

    def close(self) -> None:
        """Free the communicators. Collective."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:  # otherwise the other ranks may not be here, and a collective free would hang
            self.close()

    def __deepcopy__(self, memo: object) -> Self:
        return self


@contextlib.contextmanager
def making_communicators() -> Iterator[None]:
    """Say what to do when MPI has no communicator left to give: raises `SettledError`, on every rank of the group."""
    try:
        yield
    except load_mpi().Exception as error:
        if not any(words in str(error) for words in NONE_LEFT):
            raise
        raise SettledError(
            "MPI has no communicator left to give (MPICH has 2048 in a process). A Communicator holds 1, one more with "
            "a timeout, and up to 3 more once its large collectives share memory; a stream holds up to 2. Close what "
            "is not used"
        ) from error
