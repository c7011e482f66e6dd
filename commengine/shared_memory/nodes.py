"""Which ranks of a group share a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from commengine.mpi import load_mpi, ranks_in

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Node:
    """A node, one of as many ranks each. comm: of its ranks, in the group's order; owned.

    table: [node][rank in it] -> rank in the group; index: this rank's node.
    """

    comm: MPI.Intracomm
    index: int
    table: list[list[int]]

    @property
    def size(self) -> int:
        """Ranks of the group on each node."""
        return self.comm.size

    @property
    def alone(self) -> bool:
        """Whether the whole group is here."""
        return len(self.table) == 1


def find_node(comm: MPI.Intracomm) -> Node | None:
    """This rank's node, or None, on all ranks, where one node has one rank or more than another. Collective."""
    local: Any = comm.Split_type(load_mpi().COMM_TYPE_SHARED, comm.rank)
    mine = ranks_in(local, comm)
    table = [list(ranks) for ranks in sorted({tuple(ranks) for ranks in comm.allgather(mine)})]
    if len(mine) == 1 or any(len(ranks) != len(mine) for ranks in table):
        local.Free()
        return None
    return Node(local, table.index(mine), table)
