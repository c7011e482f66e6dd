"""Which ranks of a group share a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from commengine.agreement import each_number
from commengine.mpi import load_mpi, making_communicators, ranks_in

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Node:
    """This rank's node, in a group that has the same number of ranks, two or more, on every node.

    comm: an MPI communicator over the node's ranks, in the group's order; owned by the node.
    index: the number of the node.
    table: [node][rank in the node] -> rank in the group.
    """

    comm: MPI.Intracomm
    index: int
    table: list[list[int]]

    @property
    def size(self) -> int:
        """The number of the group's ranks on each node."""
        return self.comm.size

    @property
    def alone(self) -> bool:
        """Whether the whole group is on this node."""
        return len(self.table) == 1


def nodes_of(first: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node. first: for each rank the first rank of its node."""
    nodes: dict[int, list[int]] = {}
    for rank, leader in enumerate(first):
        nodes.setdefault(leader, []).append(rank)
    return list(nodes.values())


def find_node(comm: MPI.Intracomm) -> Node | None:
    """Return this rank's node. Collective over ``comm``.

    Returns None, on all ranks, when a node has only one rank of the group, or when the nodes have different numbers of
    them.
    """
    with making_communicators():
        local: Any = comm.Split_type(load_mpi().COMM_TYPE_SHARED, comm.rank)
    mine = ranks_in(local, comm)
    table = nodes_of(each_number(comm, mine[0], comm.size))
    if len(mine) == 1 or any(len(ranks) != len(mine) for ranks in table):
        local.Free()
        return None
    return Node(local, table.index(mine), table)
