"""The collectives that a training step must run by `commengine.cost`'s formulas, compared with those that were traced.

The formulas know the model, the parallel sizes and the papers. This module adds how this trainer packs parameters into
buckets, computed from numbers only: it looks at no model, no bucket and no trace.

    [K] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, section 4.2.2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from commengine import GridLayout, cost
from commengine.cost import Collective
from trainers.tasks.bert import BERTTrainConfig

from .recorder import TracedConfig

ALIGNMENT = 64  # in a flat buffer a parameter begins at a multiple of so many elements
SOURCES = (
    "[M] Shoeybi et al. 2019, Megatron-LM, section 3 and Figure 4 (layers, embedding, loss), appendix B.1 (gradients); "
    "[K] Korthikanti et al. 2022, sections 4.2.2 (sequence parallelism) and 5 (recomputation); "
    "[Z] Rajbhandari et al. 2020, ZeRO, sections 5.1 and 7. The others are this trainer's own: commengine/cost/step.py"
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


@dataclass(frozen=True)
class Buckets:
    """Parameters packed backwards into flat buffers.

    sizes: elements of each buffer. partial: in each buffer, the extents of parameters with a partial gradient.
    """

    sizes: list[int]
    partial: list[list[tuple[int, int]]]

    @classmethod
    def of(cls, sizes: Sequence[tuple[str, int]], largest: int, *, flat: bool, ranks: int) -> Buckets:
        """Pack the parameters.

        sizes: (name, elements) in the model's order. flat: aligned, and padded so that ``ranks`` divide each buffer.
        """
        unit = ALIGNMENT if flat else 1
        packed: list[list[tuple[str, int]]] = []
        total = 0
        for name, size in reversed(sizes):
            if not packed or total + size > largest:
                packed.append([])
                total = 0
            packed[-1].append((name, size))
            total += size
        found = cls([], [])
        for bucket in packed:
            starts = [0]
            for _, size in bucket:
                starts.append(_rounded_up(starts[-1] + size, unit))
            starts[-1] = _rounded_up(starts[-1], unit * ranks)
            found.sizes.append(starts[-1])
            extents = zip(bucket, starts, starts[1:], strict=False)
            found.partial.append([(start, end) for (name, _), start, end in extents if name.endswith(PARTIAL)])
        return found

    def partial_elements(self, rank: int, ranks: int) -> int:
        """The elements with a partial gradient in the part of each bucket that ``rank`` of ``ranks`` keeps."""
        found = 0
        for size, extents in zip(self.sizes, self.partial, strict=True):
            low, high = rank * size // ranks, (rank + 1) * size // ranks
            found += sum(max(0, min(end, high) - max(start, low)) for start, end in extents)
        return found


def shape_of(config: TracedConfig) -> cost.TransformerShape:
    """The model's shape, with its padded vocabulary and heads."""
    return config.model().cost_shape(config.seq_length, config.task, config.tensor_model_parallel_size)


@dataclass(frozen=True)
class Variant:
    """The choices of a model that `cost.TransformerShape` does not have; a GPT has none but the defaults.

    predictions: see `cost.tensor_parallel_collectives`.
    """

    post_norm: bool = False
    order_head: bool = False
    predictions: int | None = None

    @classmethod
    def of(cls, config: TracedConfig) -> Variant:
        """The choices of ``config``'s model."""
        if not isinstance(config, BERTTrainConfig):
            return cls()
        unit = config.tensor_model_parallel_size if config.sequence_parallel else 1
        predictions = _rounded_up(config.rules().predictions, unit)
        return cls(config.norm_placement == "post", not config.bert_no_binary_head, predictions)

    def sizes(self, config: TracedConfig, tensor: int) -> list[tuple[str, int]]:
        """(name, elements) of each parameter of a rank of a tensor group of ``tensor`` ranks."""
        return cost.parameter_sizes(
            shape_of(config), tensor, positions=config.positions, post_norm=self.post_norm,
            order_head=self.order_head,
        )  # fmt: skip


def expected(config: TracedConfig, world_size: int, rank: int, *, updated: bool = True) -> list[Expected]:
    """The collectives of ``rank`` of ``world_size`` in a step, by formula.

    config: valid, with its vocabulary and ``ddp_bucket_size`` known. updated: False for a step whose update was skipped
    because an fp16 gradient overflowed.
    """
    assert config.ddp_bucket_size is not None
    layout = GridLayout(world_size, config.tensor_model_parallel_size)
    tensor, data, zero1 = layout.tensor, layout.data, config.use_distributed_optimizer
    half = config.bf16 or config.fp16
    shape, batch, size = shape_of(config), config.micro_batch_size, 2 if half else 4
    recompute, variant = config.recompute_granularity or "none", Variant.of(config)
    model = cost.tensor_parallel_collectives(
        shape, batch, tensor, element_bytes=size, recompute=recompute, sequence_parallel=config.sequence_parallel,
        stops_early=config.hidden_dropout == 0 and not variant.post_norm, predictions=variant.predictions,
        order_head=variant.order_head,
    )  # fmt: skip
    model += cost.loss_collectives(shape, batch, tensor, together=True, predictions=variant.predictions)
    times = (config.global_batch_size or batch * data) // (batch * data)
    shared = cost.key_value_collectives(shape, batch, tensor, element_bytes=size, recompute=recompute)
    in_groups = [("tensor", one) for one in model] + [(f"tensor/block{one.ranks}", one) for one in shared]
    found = [Expected(group, replace(one, count=one.count * times)) for group, one in in_groups]

    sizes = variant.sizes(config, tensor)
    buckets = Buckets.of(sizes, config.ddp_bucket_size, flat=half or zero1, ranks=data if zero1 else 1)
    reduced = cost.data_parallel_collectives(
        sum(elements for _, elements in sizes), data, zero1=zero1, buckets=buckets.sizes,
        gradient_bytes=4 if config.grad_reduce_in_fp32 else size, parameter_bytes=size,
    )  # fmt: skip
    found += [Expected("data", one) for one in reduced if updated or one.part == "gradients"]
    if config.sequence_parallel:
        shard, shards = (rank // tensor, data) if zero1 else (0, 1)
        partial = buckets.partial_elements(shard, shards)
        found += [Expected("tensor", one) for one in cost.sequence_parallel_collectives(partial, tensor)]
    terms = 2 if variant.order_head else 1
    scalars = cost.scalar_collectives(tensor, data, zero1=zero1, fp16=config.fp16, terms=terms)
    found += [Expected(group, one) for group, one in scalars]
    return [one for many in found for one in _by_layer(many, shape.layers)]


def _by_layer(one: Expected, layers: int) -> list[Expected]:
    if one.what.part != "layers":
        return [one]
    share = replace(one.what, count=one.what.count // layers)
    return [replace(one, what=replace(share, part=f"layer {number}")) for number in range(layers)]


def compared(formulas: Iterable[Expected], traced: Iterable[tuple[str, str, str, str, int]]) -> list[dict[str, Any]]:
    """A row for each kind of collective that a formula or the trace has: counts by both, and whether they are equal.

    traced: (part, phase, group, operation, bytes) of each collective of one step of one rank.
    """
    wanted: Counter[tuple[str, str, str, str, int]] = Counter()
    ranks: dict[tuple[str, str, str, str, int], int] = {}
    sources: dict[tuple[str, str, str, str, int], list[str]] = {}
    for one in formulas:
        wanted[one.key] += one.what.count
        ranks[one.key] = one.what.ranks
        sources.setdefault(one.key, []).append(one.what.why)
    seen = Counter(traced)
    rows = []
    for key in dict.fromkeys([*wanted, *seen]):
        part, phase, group, operation, nbytes = key
        rows.append({
            "part": part, "phase": phase, "group": group, "operation": operation, "bytes": nbytes,
            "formula_count": wanted[key], "traced_count": seen[key], "formula_bytes": wanted[key] * nbytes,
            "traced_bytes": seen[key] * nbytes, "source": "; ".join(sources.get(key, ["no formula"])),
            "equal": wanted[key] == seen[key],
        })  # fmt: skip
    return rows


def folded(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with one row "each layer" in place of those that all layers have alike."""
    kinds = [tuple(value for name, value in row.items() if name != "part") for row in rows]
    in_layers = [row["part"].startswith("layer ") for row in rows]
    layers = len({row["part"] for row, inside in zip(rows, in_layers, strict=True) if inside})
    many = Counter(kind for kind, inside in zip(kinds, in_layers, strict=True) if inside)
    found, told = [], set()
    for row, kind, inside in zip(rows, kinds, in_layers, strict=True):
        if not inside or many[kind] != layers:
            found.append(row)
        elif kind not in told:
            told.add(kind)
            found.append(row | {"part": "each layer"})
    return found


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
