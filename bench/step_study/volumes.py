"""The collectives that a training step must run by `commengine.cost`'s formulas, compared with those that were traced.

The formulas know the model, the parallel sizes and the papers. This module adds how this trainer packs parameters into
buckets, computed from numbers only: it looks at no model, no bucket and no trace.

    [K] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, section 4.2.2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from commengine import GridLayout
from tplayers import ModelPart, formulas
from tplayers.formulas import Collective
from trainers.settings import derived
from trainers.settings.commands import BERTSettings
from trainers.tasks.bert import BERTTask
from trainers.tasks.kinds import task_of
from trainers.tasks.step_model import step_model

from .recorder import TracedConfig
from .spans import chunk_of

TIED = "embedding.weight"
ALIGNMENT = 64  # in a flat buffer a parameter begins at a multiple of so many elements
SOURCES = (
    "[M] Shoeybi et al. 2019, Megatron-LM, section 3 and Figure 4 (layers, embedding, loss), appendix B.1 (gradients); "
    "[K] Korthikanti et al. 2022, sections 4.2.2 (sequence parallelism) and 5 (recomputation); "
    "[Z] Rajbhandari et al. 2020, ZeRO, sections 5.1 and 7; [P] Narayanan et al. 2021, section 4.1 (messages between "
    "stages); [U] Jacobs et al. 2023 and [R] Liu et al. 2023 (shared sequences). The others are this trainer's own: "
    "tplayers/formulas/step.py"
)
#: endings of the names of parameters that act on sequence shards: each rank has a part of their gradient [K]
PARTIAL = (
    "_norm.weight", "_norm.bias", "projection.bias", "mlp.down.bias", "position_embedding", "token_type_embedding",
    "mlm_head.dense.weight", "mlm_head.dense.bias", "mlm_head.norm.weight", "mlm_head.norm.bias",
)  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """A formula's collective, and the group that runs it. It belongs to one layer if ``part`` is "layer N"."""

    group: str
    what: Collective

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """The key that traced collectives of this kind share with it."""
        return (self.what.part, self.what.phase, self.group, self.what.operation, round(self.what.size))


def packed(
    sizes: Sequence[tuple[str, int]], largest: int, *, flat: bool, ranks: int,
    kind: Callable[[str], object] = lambda _: None,
) -> list[list[tuple[str, int, int]]]:  # fmt: skip
    """(name, start, end) of each parameter in each flat buffer, in elements. Parameters are packed backwards.

    sizes: (name, elements) in the model's order. flat: aligned, and padded so that ``ranks`` divide each buffer.
    kind: of a name; all of a buffer have one.
    """
    unit = ALIGNMENT if flat else 1
    buckets: list[list[tuple[str, int, int]]] = []
    total = end = 0
    for name, size in reversed(sizes):
        if not buckets or total + size > largest or kind(name) != kind(buckets[-1][0][0]):
            buckets.append([])
            total = end = 0
        total, start, end = total + size, end, _rounded_up(end + size, unit)
        buckets[-1].append((name, start, end))
    for bucket in buckets:
        name, start, end = bucket[-1]
        bucket[-1] = (name, start, _rounded_up(end, unit * ranks))
    return buckets


def partial_elements(buckets: Sequence[Sequence[tuple[str, int, int]]], rank: int, ranks: int) -> int:
    """The elements with a partial gradient in the part of each bucket that ``rank`` of ``ranks`` keeps."""
    found = 0
    for bucket in buckets:
        size = bucket[-1][2]
        low, high = rank * size // ranks, (rank + 1) * size // ranks
        partial = (extent for name, *extent in bucket if name.endswith(PARTIAL))
        found += sum(max(0, min(end, high) - max(start, low)) for start, end in partial)
    return found


def shape_of(config: TracedConfig) -> formulas.TransformerShape:
    """The model's shape, with its padded vocabulary and heads."""
    return task_of(config).cost_shape()


def choices(config: TracedConfig) -> tuple[bool, bool, int | None]:
    """The choices of a model that `formulas.TransformerShape` does not have; a GPT has none of them.

    Returns whether norms come after the sums, whether there is a head for the order of sentences, and the predictions
    that `formulas.tensor_parallel_collectives` takes.
    """
    if not isinstance(config, BERTSettings):
        return False, False, None
    unit = config.tensor_model_parallel_size if config.sequence_parallel else 1
    predictions = _rounded_up(BERTTask(config).rules().predictions, unit)
    return config.norm_placement == "post", not config.bert_no_binary_head, predictions


def parameter_sizes(config: TracedConfig, part: ModelPart) -> list[tuple[str, int]]:
    """(name, elements) of each parameter of a rank that has this part of the model."""
    post_norm, order_head, _ = choices(config)
    found = formulas.parameter_sizes(
        shape_of(config), config.tensor_model_parallel_size, positions=derived.positions(config), post_norm=post_norm,
        order_head=order_head,
    )  # fmt: skip
    return [(name, size) for name, size in found if _has(part, name, tied=not shape_of(config).untied)]


def _has(part: ModelPart, name: str, *, tied: bool) -> bool:
    """Whether a parameter lies in ``part``."""
    if name.startswith("layers."):
        return int(name.split(".")[1]) in part.numbers
    if name == TIED:
        return part.first or (tied and part.last)
    return part.first if name.startswith(("embedding", "position_embedding", "token_type_embedding")) else part.last


def expected(config: TracedConfig, world_size: int, rank: int, *, updated: bool = True) -> list[Expected]:
    """The collectives of ``rank`` of ``world_size`` in a step, by formula.

    config: valid, with its vocabulary and ``ddp_bucket_size`` known. updated: False for a step whose update was skipped
    because an fp16 gradient overflowed.
    """
    assert config.ddp_bucket_size is not None
    layout = GridLayout(
        world_size, config.tensor_model_parallel_size, config.context_parallel_size, config.pipeline_model_parallel_size
    )
    tensor, data, context = layout.tensor, layout.data, layout.context
    zero1, replicas = config.use_distributed_optimizer, data * context
    place, stages = layout.place(rank), layout.pipeline
    part = task_of(config).parts()[place["pipeline"]]
    half = config.bf16 or config.fp16
    _, order_head, predictions = choices(config)
    model = step_model(config, world_size, predictions)
    shape, times = model.shape, model.layout.micro_batches
    of_layers = [Expected(group, replace(one, count=one.count * times)) for group, one in model.of_microbatch()]
    found = [
        one for many in of_layers for one in _by_layer(many, shape.layers) if chunk_of(part, one.what.part) is not None
    ]
    if stages > 1:
        sent = formulas.stage_messages(
            replace(shape, seq=shape.seq // context), config.micro_batch_size, place["pipeline"], stages, times,
            derived.chunks(config), element_bytes=model.element_bytes,
            shards=tensor if config.sequence_parallel else 1,
        )  # fmt: skip
        found += [Expected("pipeline", one) for one in sent]

    tied = stages > 1 and not shape.untied and (part.first or part.last)
    sizes = parameter_sizes(config, part)
    if tied:  # it is complete last
        sizes.sort(key=lambda one: one[0] != TIED)
    buckets = packed(
        sizes, config.ddp_bucket_size, flat=half or zero1, ranks=replicas if zero1 else 1,
        kind=lambda name: (part.chunk_of(name), tied and name == TIED),
    )  # fmt: skip
    if tied:
        (elements,) = (bucket[-1][2] for bucket in buckets if bucket[0][0] == TIED)
        why = "gradients of both uses of a tied embedding"
        found.append(Expected("ends", Collective("all_reduce", 4 * elements, 2, 1, why, "gradients")))
    reduced = model.of_gradients(sum(elements for _, elements in sizes), [bucket[-1][2] for bucket in buckets])
    found += [Expected(group, one) for group, one in reduced if updated or one.part == "gradients"]
    if config.sequence_parallel:
        shard, shards = (place["data"] * context + place["context"], replicas) if zero1 else (0, 1)
        partial = partial_elements(buckets, shard, shards)
        found += [Expected("tensor", one) for one in formulas.sequence_parallel_collectives(partial, tensor)]
    terms = 1 + order_head
    scalars = formulas.scalar_collectives(
        tensor, data, context=context, pipeline=stages, zero1=zero1, fp16=config.fp16, terms=terms
    )
    return found + [Expected(group, one) for group, one in scalars]


def _by_layer(one: Expected, layers: int) -> list[Expected]:
    if one.what.part != "layers":
        return [one]
    share = replace(one.what, count=one.what.count // layers)
    return [replace(one, what=replace(share, part=f"layer {number}")) for number in range(layers)]


def compared(formulas: Iterable[Expected], traced: Iterable[tuple[str, str, str, str, int]]) -> list[dict[str, Any]]:
    """A row for each kind of collective that a formula or the trace has: counts by both, and whether they are equal.

    traced: (part, phase, group, operation, bytes) of each collective of one step of one rank.
    """
    wanted: dict[tuple[str, str, str, str, int], list[Collective]] = {}
    for one in formulas:
        wanted.setdefault(one.key, []).append(one.what)
    seen = Counter(traced)
    rows = []
    for key in dict.fromkeys([*wanted, *seen]):
        part, phase, group, operation, nbytes = key
        mine, found = wanted.get(key, []), seen[key]
        count, why = sum(one.count for one in mine), "; ".join(one.why for one in mine) or "no formula"
        rows.append({
            "part": part, "phase": phase, "group": group, "operation": operation, "bytes": nbytes,
            "formula_count": count, "traced_count": found, "formula_bytes": count * nbytes,
            "traced_bytes": found * nbytes, "source": why, "equal": count == found,
        })  # fmt: skip
    return rows


def folded(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with one row "each layer" in place of those that all layers have alike."""

    def kind(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(value for name, value in row.items() if name != "part")

    in_layers = [row for row in rows if row["part"].startswith("layer ")]
    layers, many = len({row["part"] for row in in_layers}), Counter(map(kind, in_layers))
    found = [
        row | {"part": "each layer"} if row["part"].startswith("layer ") and many[kind(row)] == layers else row
        for row in rows
    ]
    return list({tuple(row.items()): row for row in found}.values())


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
