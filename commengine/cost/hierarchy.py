"""Collectives over nodes whose ranks share network adapters."""

from __future__ import annotations

from dataclasses import dataclass

from .collectives import Cost, Link, collective


@dataclass(frozen=True)
class Machine:
    """Nodes of ``ranks_per_node`` ranks, joined by ``nics_per_node`` adapters that a node's ranks share.

    inside: a rank's link to another in its node. between: one adapter's link to one of another node.
    """

    inside: Link
    between: Link
    ranks_per_node: int
    nics_per_node: int

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.nics_per_node < 1:
            raise ValueError("a node has at least one rank and one network adapter")

    def between_for(self, sending: int) -> Link:
        """The link between nodes of each of ``sending`` ranks of a node that send at once."""
        return self.between.shared(sending / self.nics_per_node)


@dataclass(frozen=True)
class Phase:
    """A part of a hierarchical collective: where it runs, its cost for a rank, its seconds."""

    name: str
    cost: Cost
    seconds: float


def hierarchical_all_reduce(
    size: float, members_per_node: int, nodes: int, machine: Machine, groups_per_node: int = 1
) -> tuple[Phase, ...]:
    """Reduce-scatter inside each node, all-reduce of the slices between nodes, all-gather inside: all by rings.

    Every member sends its own slice between nodes at once, and so do the members of the ``groups_per_node`` groups
    that do the same at the same time; together they share the node's adapters. A ring in one node, or one member a
    node, is the special case. The composition is that of Chan et al. 2007 for long vectors, over two levels.
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
