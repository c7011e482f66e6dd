"""The seconds of a step's collectives: rings, as NCCL runs long messages, inside a node and through its adapters."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence

import numpy as np

from bench.clusters.cluster import Cluster, Device
from bench.prediction.kernels import memory_seconds
from commengine import cost
from commengine.cost import FittedModel
from tplayers.formulas import Collective, StepLayout, StepModel, TransformerShape


def megatron_step(shape: TransformerShape, layout: StepLayout, device: Device) -> StepModel:
    """The collectives and the memory of the step on such devices, as Megatron-LM has them."""
    size = device.element_bytes
    return StepModel(
        shape, layout, element_bytes=size, gradient_bytes=size, stops_early=stops_early(layout, device), together=False
    )  # fmt: skip


def group_places(layout: StepLayout, node: int) -> dict[str, tuple[int, int]]:
    """How the groups of a micro-batch's collectives lie on nodes of ``node`` ranks (`place_of`)."""
    tensor, context, data, stages = layout.tensor, layout.context, layout.data, layout.pipeline
    # The ranks of the two others lie as a data group's would: a tensor group apart, or a tensor and a context group.
    return {
        "tensor": place_of("tensor", tensor, layout.replicas, node, stages),
        "context": place_of("data", tensor, context, node, stages * data),
        "expert": place_of("data", tensor * context, layout.expert, node, stages * data // layout.expert),
    }


def communication(
    run: Sequence[tuple[str, Collective]], layout: StepLayout, cluster: Cluster, attention: tuple[float, float]
) -> dict[str, float]:
    """The seconds in which a device waits for each group in a micro-batch. run: of `StepModel.of_microbatch`.

    attention: the seconds of a layer's attention, forward and backward. If the cluster hides communication, a message
    of a ring travels while a block is computed, of which there are as many as ranks. The backward's last gradients
    travel beside most of a rank's own block, and its first blocks beside the rest (`tplayers.context.blockwise`).
    """
    places = group_places(layout, cluster.machine.ranks_per_node)
    sizes = {"tensor": layout.tensor, "context": layout.context, "expert": layout.expert}
    found = {group: 0.0 for group, size in sizes.items() if group == "tensor" or size > 1}
    for name, one in run:
        group = name.split("/")[0]
        beside = 0.0
        if group == "context" and cluster.overlap and layout.method != "ulysses":
            beside = attention[one.phase == "backward"] / layout.context
        alone = ring_seconds(cluster, one.operation, one.size, one.ranks, *places[group])
        found[group] += one.count * max(0.0, alone - beside)
    return found


def messages(shape: TransformerShape, layout: StepLayout, cluster: Cluster) -> list[float]:
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


def _leaves_its_node(stage: int, layout: StepLayout, node: int) -> bool:
    """Whether a rank of the stage has its next one on another node."""
    width = layout.tensor * layout.replicas
    ranks = range(stage * width, (stage + 1) * width)
    return width >= node or any(rank // node != (rank + width) % layout.ranks // node for rank in ranks)


def tied_embedding(shape: TransformerShape, layout: StepLayout, cluster: Cluster) -> float:
    """The seconds of the sum of the embedding's gradients over the first and the last stage."""
    if shape.untied or layout.pipeline == 1:
        return 0.0
    node, width = cluster.machine.ranks_per_node, layout.tensor * layout.replicas
    size = cluster.device.element_bytes * shape.vocab * shape.hidden / layout.tensor
    return ring_seconds(cluster, "all_reduce", size, 2, 2 if layout.ranks <= node else 1, min(node, width))


def data_communication(
    owned: float, apart: float, layers: int, model: StepModel, cluster: Cluster, under_backward: float, slow: float
) -> tuple[float, float]:
    """The seconds of the gradients' reduction for which a device waits, and those that are hidden under backward.

    owned: the parameters of a rank that all replicas have. apart: those of its experts.
    """
    layout = model.layout
    if layout.replicas == 1:
        return 0.0, 0.0
    node, size, first, total = cluster.machine.ranks_per_node, cluster.device.element_bytes, 0.0, 0.0
    for count, apart_by in ((owned, 1), (apart, layout.expert)):
        place = place_of("data", layout.tensor * apart_by, layout.replicas // apart_by, node, layout.pipeline)
        run = model.of_gradients(count, experts=apart_by > 1)
        times = [ring_seconds(cluster, one.operation, one.size, one.ranks, *place) for _, one in run]
        first, total = first + sum(times[:1]), total + sum(times)
    if not cluster.overlap:  # copied into one flat tensor, divided, and copied back
        return total + slow * memory_seconds(cluster.device, 6 * size * (owned + apart)), 0.0
    # The first layer's gradients are complete last, and no backward is left to hide their share.
    hidden = min(first * (1 - 1 / layers), under_backward)
    return total - hidden, hidden


def stops_early(layout: StepLayout, device: Device) -> bool:
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
