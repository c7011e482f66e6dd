"""Collectives over several nodes whose ranks share network adapters."""

from __future__ import annotations

from dataclasses import dataclass

from .collectives import Cost, Link, collective


@dataclass(frozen=True)
class Machine:
    """A cluster: each node has ``ranks_per_node`` ranks, which share the node's ``nics_per_node`` network adapters.

    inside: the link from a rank to another rank of its node. between: the link from one adapter to an adapter of
    another node.
    """

    inside: Link
    between: Link
    ranks_per_node: int
    nics_per_node: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.nics_per_node < 1:
            raise ValueError("a node has at least one rank and one network adapter")

    def between_for(self, sending: int) -> Link:
        """Return the link between nodes as each rank sees it when ``sending`` ranks of a node send at once."""
        return self.between.shared(sending / self.nics_per_node)


@dataclass(frozen=True)
class Phase:
    """A part of a hierarchical collective: its name, its cost for a rank, and its time in seconds."""

    name: str
    cost: Cost
    seconds: float


def hierarchical_all_reduce(
    size: float, members_per_node: int, nodes: int, machine: Machine, groups_per_node: int = 1
) -> tuple[Phase, ...]:
    """Return the phases of an all-reduce of ``size`` bytes over two levels, all by rings.

    The phases are a reduce-scatter inside each node, an all-reduce of the slices between the nodes, and an all-gather
    inside each node (the composition of Chan et al. 2007 for long vectors, over two levels).

    members_per_node: ranks of the group on each node. groups_per_node: groups of a node that do the same at the same
    time. All their members send their slices between nodes at once and share the node's adapters. A group inside one
    node, and a group with one member on each node, are special cases. Raises ValueError if the groups do not fit a
    node.
    """
    if nodes < 1 or members_per_node * groups_per_node > machine.ranks_per_node:
        raise ValueError(
            f"{groups_per_node} groups of {members_per_node} ranks a node do not fit nodes of {machine.ranks_per_node}"
        )
    between = machine.between_for(members_per_node * groups_per_node)
    scatter = collective("reduce_scatter", "ring", size, members_per_node)
    reduce = collective("all_reduce", "ring", size / members_per_node, nodes)
    gather = collective("all_gather", "ring", size, members_per_node)
    return (
        Phase("reduce-scatter inside", scatter, scatter.seconds(machine.inside)),
        Phase("all-reduce between", reduce, reduce.seconds(between)),
        Phase("all-gather inside", gather, gather.seconds(machine.inside)),
    )
