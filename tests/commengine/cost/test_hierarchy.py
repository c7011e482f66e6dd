"""The cost of an all-reduce on two levels, inside and between nodes."""

import pytest

from commengine import cost
from commengine.cost import Link, Machine


def test_hierarchical_all_reduce():
    """32 nodes of 16 ranks and 8 adapters of 12 GB/s: between nodes all that counts is what leaves a node."""
    machine = Machine(Link(0, 1 / 120e9), Link(0, 1 / 12e9), ranks_per_node=16, nics_per_node=8)
    inside, between, after = cost.hierarchical_all_reduce(1.6e9, 16, 32, machine)
    assert inside.seconds == after.seconds == pytest.approx(15 / 16 * 1.6e9 / 120e9)
    assert between.seconds == pytest.approx(2 * 31 / 32 * 1.6e9 / (8 * 12e9))
    # 8 groups of 2 that run at once load the adapters as one group of 16 with 8 times the data.
    _, crowded, _ = cost.hierarchical_all_reduce(1.6e9, 2, 32, machine, groups_per_node=8)
    assert crowded.seconds == pytest.approx(8 * between.seconds)
    # More adapters than senders do not make one sender faster.
    _, lone, _ = cost.hierarchical_all_reduce(1.6e9, 1, 2, machine)
    assert lone.seconds == pytest.approx(1.6e9 / 12e9)
    only = cost.hierarchical_all_reduce(1e6, 8, 1, machine)
    ring = cost.collective("all_reduce", "ring", 1e6, 8).seconds(machine.inside)
    assert sum(phase.seconds for phase in only) == pytest.approx(ring)
    with pytest.raises(ValueError, match="do not fit nodes of 16"):
        cost.hierarchical_all_reduce(1, 4, 2, machine, groups_per_node=5)
