"""The seconds of a step's collectives: rings, as NCCL runs long messages, inside a node and through its adapters."""

from __future__ import annotations

import math

from bench.clusters.cluster import Cluster
from bench.prediction.kernels import memory_seconds
from bench.prediction.layout import Layout
from commengine import cost
from commengine.cost import TransformerShape


def tensor_communication(shape: TransformerShape, layout: Layout, cluster: Cluster) -> float:
    """The seconds of a step during which a device waits for its tensor group, over all micro-batches."""
    ranks = cluster.machine.ranks_per_node
    members = min(layout.tensor, ranks)
    groups = max(1, min(ranks, layout.ranks) // members)
    run = cost.tensor_parallel_collectives(
        shape,
        layout.micro_batch,
        layout.tensor,
        element_bytes=cluster.device.element_bytes,
        recompute=layout.recompute,
        sequence_parallel=layout.sequence_parallel,
    )
    run += cost.loss_collectives(shape, layout.micro_batch, layout.tensor)
    run += cost.key_value_collectives(
        shape, layout.micro_batch, layout.tensor, element_bytes=cluster.device.element_bytes, recompute=layout.recompute
    )
    return layout.micro_batches * sum(
        one.count * ring_seconds(cluster, one.operation, one.size, one.ranks, members, groups) for one in run
    )


def data_communication(
    owned: float, layers: int, layout: Layout, cluster: Cluster, under_backward: float, slow: float
) -> tuple[float, float]:
    """The seconds of the gradients' reduction for which a device waits, and those that are hidden under backward."""
    if layout.data == 1:
        return 0.0, 0.0
    node = cluster.machine.ranks_per_node
    groups = min(layout.tensor, node)
    members = max(1, min(layout.data, node // layout.tensor))
    size = cluster.device.element_bytes
    run = cost.data_parallel_collectives(
        owned, layout.data, gradient_bytes=size, parameter_bytes=size, zero1=layout.zero1
    )
    times = [ring_seconds(cluster, one.operation, one.size, one.ranks, members, groups) for one in run]
    copies = 0.0
    if not cluster.overlap:  # copied into one flat tensor, divided, and copied back
        copies = slow * memory_seconds(cluster.device, 6 * size * owned)
        return sum(times) + copies, 0.0
    # The first layer's gradients are complete last, and no backward is left to hide their share.
    hidden = min(times[0] * (1 - 1 / layers), under_backward)
    return sum(times) - hidden, hidden


def ring_seconds(
    cluster: Cluster, operation: str, size: float, ranks: int, members_per_node: int, groups_per_node: int
) -> float:
    """The seconds of a collective by one ring through all ranks of a group, node by node.

    The ``groups_per_node`` groups that run at once share the node's adapters; a single group uses all of them.
    """
    if ranks == 1:
        return 0.0
    machine = cluster.machine
    nodes = math.ceil(ranks / members_per_node)
    ring = cost.collective(operation, "ring", size, ranks)
    if nodes == 1:
        if cluster.fitted:
            return cluster.fitted.seconds(operation, size, ranks)
        return cluster.base + ring.seconds(machine.inside)
    crossing = ring.steps * (nodes - 1) / (ranks - 1)
    alpha = (ring.steps - crossing) * machine.inside.alpha + crossing * machine.between.alpha
    beta = max(machine.inside.beta, machine.between.beta * groups_per_node / machine.nics_per_node)
    return cluster.base + alpha + ring.path_bytes * beta
