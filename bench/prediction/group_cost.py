"""The seconds of a step's collectives: rings, as NCCL runs long messages, inside a node and through its adapters."""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import replace

import numpy as np

from bench.clusters.cluster import Cluster, Device
from bench.prediction.kernels import memory_seconds
from bench.prediction.layout import Layout
from commengine import cost
from commengine.cost import FittedModel
from tplayers import formulas
from tplayers.formulas import StageShape, TransformerShape


def tensor_communication(
    shape: TransformerShape, layout: Layout, cluster: Cluster, stage: StageShape, only: str = ""
) -> float:
    """The seconds of a micro-batch in which a device of the stage waits for its tensor group. only: of this phase."""
    shape = replace(shape, layers=stage.layers, seq=shape.seq // layout.context)
    place = place_of("tensor", layout.tensor, layout.replicas, cluster.machine.ranks_per_node, layout.pipeline)
    run = formulas.tensor_parallel_collectives(
        shape,
        layout.micro_batch,
        layout.tensor,
        element_bytes=cluster.device.element_bytes,
        recompute=layout.recompute,
        sequence_parallel=layout.sequence_parallel,
        stops_early=stops_early(layout, cluster.device),
    )
    run += formulas.loss_collectives(shape, layout.micro_batch, layout.tensor)
    run += formulas.key_value_collectives(
        shape, layout.micro_batch, layout.tensor, element_bytes=cluster.device.element_bytes, recompute=layout.recompute
    )
    parts = {"layers", *(["embedding"] if stage.first else [])}
    return sum(
        one.count * ring_seconds(cluster, one.operation, one.size, one.ranks, *place)
        for one in run
        if (one.part in parts or (stage.last and one.part != "embedding")) and only in ("", one.phase)
    )


def context_communication(
    shape: TransformerShape, layout: Layout, cluster: Cluster, stage: StageShape, attention: tuple[float, float],
    only: str = "",
) -> float:  # fmt: skip
    """The seconds of a micro-batch in which a device of the stage waits for its context group. only: of this phase.

    attention: the seconds of a layer's attention, forward and backward. If the cluster hides communication, a message
    travels while a block is computed, of which there are as many as ranks. The backward's last gradients travel beside
    most of a rank's own block, and its first blocks beside the rest (`tplayers.context.blockwise`).
    """
    if layout.context == 1:
        return 0.0
    # The ranks of a context group lie as a data group's would: a tensor group apart.
    node, others = cluster.machine.ranks_per_node, layout.pipeline * layout.data
    place = place_of("data", layout.tensor, layout.context, node, others)
    run = formulas.context_collectives(
        replace(shape, layers=stage.layers), layout.micro_batch, layout.tensor, layout.context, layout.method,
        element_bytes=cluster.device.element_bytes, recompute=layout.recompute,
    )  # fmt: skip
    forward, backward = (seconds / layout.context for seconds in attention)
    total = 0.0
    for one in run:
        if only not in ("", one.phase) or (one.part == "pooler" and not stage.last):
            continue
        beside = 0.0
        if cluster.overlap and layout.method != "ulysses":
            beside = backward if one.phase == "backward" else forward
        alone = ring_seconds(cluster, one.operation, one.size, one.ranks, *place)
        total += one.count * max(0.0, alone - beside)
    return total


def expert_communication(
    shape: TransformerShape, layout: Layout, cluster: Cluster, stage: StageShape, only: str = ""
) -> float:
    """The seconds of a micro-batch in which a device of the stage waits for its expert group. only: of this phase."""
    # The ranks lie as a data group's would: a tensor and a context group apart.
    node, others = cluster.machine.ranks_per_node, layout.pipeline * layout.data // layout.expert
    place = place_of("data", layout.tensor * layout.context, layout.expert, node, others)
    run = formulas.expert_collectives(
        replace(shape, layers=stage.layers, seq=shape.seq // layout.context), layout.micro_batch, layout.expert,
        element_bytes=cluster.device.element_bytes, recompute=layout.recompute,
    )  # fmt: skip
    return sum(
        one.count * ring_seconds(cluster, one.operation, one.size, one.ranks, *place)
        for one in run
        if only in ("", one.phase)
    )


def messages(shape: TransformerShape, layout: Layout, cluster: Cluster) -> list[float]:
    """The seconds of a message from each stage to the next, or back; the last one's next is the first.

    Ranks are numbered tensor first and pipeline last. Ranks that send to another node share its adapters.
    """
    machine, width = cluster.machine, layout.tensor * layout.replicas
    whole = layout.micro_batch * shape.seq // layout.context * shape.hidden * cluster.device.element_bytes
    size = whole / (layout.tensor if layout.sequence_parallel or layout.scattered else 1)
    gathered = 0.0
    if layout.scattered and not layout.sequence_parallel:
        place = place_of("tensor", layout.tensor, layout.replicas, machine.ranks_per_node, layout.pipeline)
        gathered = ring_seconds(cluster, "all_gather", whole, layout.tensor, *place)
    shared = max(1, min(machine.ranks_per_node, width) / machine.nics_per_node)
    far = machine.between.alpha + size * max(machine.inside.beta, machine.between.beta * shared)
    near = machine.inside.alpha + size * machine.inside.beta
    return [
        cluster.base + gathered + (far if _leaves_its_node(stage, layout, machine.ranks_per_node) else near)
        for stage in range(layout.pipeline)
    ]


def _leaves_its_node(stage: int, layout: Layout, node: int) -> bool:
    """Whether a rank of the stage has its next one on another node."""
    width = layout.tensor * layout.replicas
    ranks = range(stage * width, (stage + 1) * width)
    return width >= node or any(rank // node != (rank + width) % layout.ranks // node for rank in ranks)


def tied_embedding(shape: TransformerShape, layout: Layout, cluster: Cluster) -> float:
    """The seconds of the sum of the embedding's gradients over the first and the last stage."""
    if shape.untied or layout.pipeline == 1:
        return 0.0
    node, width = cluster.machine.ranks_per_node, layout.tensor * layout.replicas
    size = cluster.device.element_bytes * shape.vocab * shape.hidden / layout.tensor
    return ring_seconds(cluster, "all_reduce", size, 2, 2 if layout.ranks <= node else 1, min(node, width))


def data_communication(
    owned: float, apart: float, layers: int, layout: Layout, cluster: Cluster, under_backward: float, slow: float
) -> tuple[float, float]:
    """The seconds of the gradients' reduction for which a device waits, and those that are hidden under backward.

    owned: the parameters of a rank that all replicas have. apart: those of its experts.
    """
    if layout.replicas == 1:
        return 0.0, 0.0
    node, size, first, total = cluster.machine.ranks_per_node, cluster.device.element_bytes, 0.0, 0.0
    for count, apart_by in ((owned, 1), (apart, layout.expert)):
        ranks = layout.replicas // apart_by
        place = place_of("data", layout.tensor * apart_by, ranks, node, layout.pipeline)
        run = (
            formulas.data_parallel_collectives(
                count, ranks, gradient_bytes=size, parameter_bytes=size, zero1=layout.zero1
            )
            if count
            else []
        )
        times = [ring_seconds(cluster, one.operation, one.size, one.ranks, *place) for one in run]
        first, total = first + sum(times[:1]), total + sum(times)
    if not cluster.overlap:  # copied into one flat tensor, divided, and copied back
        return total + slow * memory_seconds(cluster.device, 6 * size * (owned + apart)), 0.0
    # The first layer's gradients are complete last, and no backward is left to hide their share.
    hidden = min(first * (1 - 1 / layers), under_backward)
    return total - hidden, hidden


def stops_early(layout: Layout, device: Device) -> bool:
    """Whether a recomputed layer ends before its last product and sum, as torch's checkpoint does.

    It does unless something that the backward needs comes after them: a mask of dropout.
    """
    return device.kernels == "fused" and not layout.hidden_dropout


def place_of(group: str, tensor: int, data: int, node: int, pipeline: int = 1) -> tuple[int, int]:
    """The members of a group that lie on one node, and the groups of its kind that run at once there.

    group: "tensor" or "data". tensor, data, pipeline: the sizes of such groups. node: the ranks of a node.
    """
    if group == "tensor":
        members = min(tensor, node)
        return members, max(1, min(node, tensor * data * pipeline) // members)
    stages = max(1, min(pipeline, node // (tensor * data)))
    return max(1, min(data, node // tensor)), min(tensor, node) * stages


def ring_seconds(
    cluster: Cluster, operation: str, size: float, ranks: int, members_per_node: int, groups_per_node: int
) -> float:
    """The seconds of a collective by one ring through all ranks of a group, node by node.

    The ``groups_per_node`` groups that run at once share the node's adapters; a single group uses all of them. If
    groups that lie so were measured, inside a node or between nodes as this one, the measured model says the seconds.
    """
    if ranks == 1:
        return 0.0
    hop = operation == "sendrecv"  # around a ring: models have it as a message
    operation, algorithm = ("p2p", "direct") if hop else (operation, "ring")
    known = cluster.measured.get((members_per_node, groups_per_node))
    if known is not None:
        inside = ranks <= members_per_node
        alike = [one for one in known.collectives.get(operation, ()) if (one.ranks <= members_per_node) == inside]
        if alike:
            return FittedModel({operation: tuple(alike)}).seconds(operation, size, ranks)
    machine = cluster.machine
    nodes = math.ceil(ranks / members_per_node)
    ring = cost.collective(operation, algorithm, size, ranks)
    if nodes == 1:
        if cluster.fitted:
            return cluster.fitted.seconds(operation, size, ranks)
        return cluster.base + ring.seconds(machine.inside)
    if operation == "all_to_all":
        alpha = exchange_latency(ranks, members_per_node, machine.inside.alpha, machine.between.alpha)
    else:
        crossing = ring_crossing(ranks, members_per_node, int(ring.steps))
        alpha = (ring.steps - crossing) * machine.inside.alpha + crossing * machine.between.alpha
    beta = max(machine.inside.beta, machine.between.beta * groups_per_node / machine.nics_per_node)
    return cluster.base + alpha + ring.path_bytes * beta


@functools.lru_cache(maxsize=4096)
def ring_crossing(ranks: int, members: int, steps: int) -> int:
    """How many links between nodes a message passes in ``steps`` consecutive links of a ring, at most.

    The ring of ``ranks`` goes through ``members`` of a node, then through the next node, and back to the first one: n
    nodes have n links between them.
    """
    links = [*range(members - 1, ranks - 1, members), ranks - 1]  # that lead to another node
    rounds, rest = divmod(steps, ranks)
    twice = [*links, *(link + ranks for link in links)]
    return rounds * len(links) + max(bisect.bisect_left(twice, link + rest) - at for at, link in enumerate(links))


@functools.lru_cache(maxsize=1024)
def exchange_latency(ranks: int, members: int, inside: float, between: float) -> float:
    """The seconds of the messages on the longest path of an all-to-all by pairwise exchange, without their bytes.

    In step k a rank receives from the k-th one before it, which has ended its own step before. inside, between: the
    seconds of a message.
    """
    nodes, done = np.arange(ranks) // members, np.zeros(ranks)
    for step in range(1, ranks):
        message = np.where(nodes == np.roll(nodes, step), inside, between)
        done = np.maximum(done, np.roll(done, step) + message)
    return float(done.max())
