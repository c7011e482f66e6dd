"""A training step on a layout: which collectives a rank has, and what it keeps.

``--dry-run``, ``bench.predict``, and the tables and the projection of ``bench.study`` ask the same `StepModel`; each
has its own seconds for what the model counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .context import context_collectives
from .experts import expert_collectives
from .memory import KeptTensors, training_bytes
from .pipeline import kept_microbatches
from .step import (
    Collective,
    data_parallel_collectives,
    key_value_collectives,
    loss_collectives,
    tensor_parallel_collectives,
)
from .transformer import StageShape, TransformerShape


@dataclass(frozen=True)
class StepLayout:
    """How a step is spread over tensor x context x data x pipeline ranks, and what it keeps.

    Each rank runs ``micro_batches`` x ``micro_batch`` samples. hidden_dropout, attention_dropout: whether there is such
    dropout. position_mask: attention dropout draws its mask as a function of position, so no fused kernel computes
    attention (``--attention-dropout-mask position``). chunk_layers: the layers of a chunk, if stages are interleaved.
    scattered: without sequence parallelism, a rank sends 1 / t of a stage's result, which the next one's ranks gather
    (Narayanan et al. 2021, section 4.1), and not all of it. context: the ranks that share a sequence. method: how their
    attention sees all of it (`tplayers.ContextGroup`). expert: the data-parallel ranks that share experts.
    """

    tensor: int = 1
    data: int = 1
    micro_batch: int = 8
    micro_batches: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    zero1: bool = False
    hidden_dropout: bool = True
    attention_dropout: bool = True
    position_mask: bool = False
    pipeline: int = 1
    chunk_layers: int | None = None
    scattered: bool = False
    context: int = 1
    method: str = "ulysses"
    expert: int = 1

    @property
    def ranks(self) -> int:
        """The number of devices."""
        return self.tensor * self.replicas * self.pipeline

    @property
    def replicas(self) -> int:
        """The ranks that have the same parameters: those of a data group and of their context groups."""
        return self.data * self.context

    @property
    def of_replicas(self) -> str:
        """The name of the group of the replicas."""
        return "data" if self.context == 1 else "replicas"

    @property
    def batch(self) -> int:
        """The sequences of a step, over all devices."""
        return self.data * self.micro_batch * self.micro_batches


@dataclass(frozen=True)
class StepModel:
    """A training step of ``shape`` on ``layout``.

    element_bytes: of a parameter and of an activation. gradient_bytes: of a gradient that is sent. stops_early,
    order_head, predictions: as in `tensor_parallel_collectives`. together: as in `loss_collectives`.
    """

    shape: TransformerShape
    layout: StepLayout
    element_bytes: float = 2
    gradient_bytes: float = 2
    stops_early: bool = False
    order_head: bool = True
    predictions: int | None = None
    together: bool = True

    def of_microbatch(self, stage: StageShape | None = None) -> list[tuple[str, Collective]]:
        """Return (group, collective) of a rank of ``stage`` (default: the whole model) for one micro-batch.

        The groups are tensor, context and expert, and tensor/block of ranks that share a head of keys and values.
        """
        layout, stage = self.layout, stage or StageShape(self.shape.layers)
        batch, whole = layout.micro_batch, replace(self.shape, layers=stage.layers)
        here = replace(whole, seq=whole.seq // layout.context)
        size, recompute = self.element_bytes, layout.recompute
        of_tensor = tensor_parallel_collectives(
            here, batch, layout.tensor, element_bytes=size, recompute=recompute, predictions=self.predictions,
            sequence_parallel=layout.sequence_parallel, stops_early=self.stops_early, order_head=self.order_head,
        )  # fmt: skip
        of_tensor += loss_collectives(here, batch, layout.tensor, together=self.together, predictions=self.predictions)
        shared = key_value_collectives(here, batch, layout.tensor, element_bytes=size, recompute=recompute)
        of_context = context_collectives(
            whole, batch, layout.tensor, layout.context, layout.method, element_bytes=size, recompute=recompute,
            order_head=self.order_head,
        )  # fmt: skip
        of_expert = expert_collectives(here, batch, layout.expert, element_bytes=size, recompute=recompute)
        found = [("tensor", one) for one in of_tensor] + [(f"tensor/block{one.ranks}", one) for one in shared]
        found += [("context", one) for one in of_context] + [("expert", one) for one in of_expert]
        there = {"layers": True, "embedding": stage.first}
        return [(group, one) for group, one in found if there.get(one.part, stage.last)]

    def of_gradients(
        self, count: float, buckets: Sequence[float] | None = None, *, experts: bool = False
    ) -> list[tuple[str, Collective]]:
        """Return (group, collective) of a rank, once a step, for the gradients of ``count`` parameters that it owns.

        buckets: the elements of each collective, instead of one for all. experts: the parameters are those of experts,
        whose gradients are summed over the ``expert_replicas``.
        """
        layout = self.layout
        group = "expert_replicas" if experts else layout.of_replicas
        found = data_parallel_collectives(
            count, layout.replicas // (layout.expert if experts else 1), gradient_bytes=self.gradient_bytes,
            parameter_bytes=self.element_bytes, zero1=layout.zero1, buckets=buckets,
        )  # fmt: skip
        return [(group, one) for one in found] if count else []

    def memory(self, kept: KeptTensors, stages: Sequence[StageShape], chunks: int = 1) -> list[dict[str, float]]:
        """Return the bytes of a rank of each stage, by use (`training_bytes`). chunks: of a rank."""
        layout = self.layout
        return [
            training_bytes(
                self.shape, layout.micro_batch, layout.tensor, layout.data, kept, stage,
                kept_microbatches(number, len(stages), layout.micro_batches, chunks), context=layout.context,
                expert=layout.expert,
            )
            for number, stage in enumerate(stages)
        ]  # fmt: skip


def equal_buckets(count: float, largest: float) -> list[float]:
    """Return the elements of the buckets of ``count`` elements, if they are as equal as they can be."""
    many = max(1, math.ceil(count / largest))
    return [count / many] * many
