"""Find the fastest predicted way to spread a model over N devices that fits, and say why the others lose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bench.clusters.cluster import Cluster
from bench.prediction.layout import stage_chunks
from bench.prediction.memory import kept_tensors
from bench.prediction.model_cost import predict
from bench.prediction.predicted_step import PredictedStep
from bench.prediction.step_report import tflops
from commengine.options.ranges import divisors
from tplayers.formulas import StepLayout, TransformerShape

# The fields of StepLayout that the search varies and a caller may fix, with their options.
SEARCHED = {
    "tensor": "--tensor-model-parallel-size",
    "context": "--context-parallel-size",
    "pipeline": "--pipeline-model-parallel-size",
    "expert": "--expert-model-parallel-size",
    "micro_batch": "--micro-batch-size",
    "recompute": "--recompute-granularity",
    "sequence_parallel": "--sequence-parallel",
    "zero1": "--use-distributed-optimizer",
}

#: the fewest positions of a rank for which the search shares a sequence: below, products are too small to gain
SHORTEST_PART = 1024
#: the methods that share sequences, of which the search takes the better one
SHARING = ("ulysses", "ring")


@dataclass(frozen=True)
class Candidate:
    """A layout, its predicted step, and what is against it ("" for the winner)."""

    layout: StepLayout
    step: PredictedStep
    fits: bool
    why: str = ""


def layouts(
    shape: TransformerShape, gpus: int, batch: int, like: StepLayout, methods: Sequence[str] = SHARING, asked: int = 1
) -> Iterator[StepLayout]:
    """Yield every layout whose sizes divide what they split, with the dropout of ``like``.

    methods: by which ranks may share sequences. asked: a context size that is tried, however short the parts are.

    Sequence parallelism is only tried with tensor > 1, and ZeRO-1 only with data > 1, because otherwise they do
    nothing. If ``like`` has chunks, stages are cut into such chunks.
    """
    ways = list(product(("none", "selective", "full"), (False, True), (False, True)))
    contexts = [c for c in divisors(gpus) if c in (1, asked) or shape.seq // c >= SHORTEST_PART]
    shared = [(1, like.method), *((c, method) for c in contexts if c > 1 for method in methods)]
    for tensor, (context, method) in product(divisors(gpus), shared):
        split = shape.heads, shape.hidden, shape.vocab, shape.mlp, shape.shared
        if any(size % tensor for size in split) or (shape.groups % tensor and tensor % shape.groups):
            continue
        parts = 1 if context == 1 else context if method == "ulysses" or shape.model == "bert" else 2 * context
        unequal = method == "ulysses" and shape.heads // tensor % context
        if gpus % (tensor * context) or shape.seq % parts or unequal:
            continue
        for stages in divisors(gpus // tensor // context):
            data = gpus // tensor // context // stages
            if batch % data:
                continue
            experts = [size for size in divisors(data) if shape.experts % size == 0] if shape.experts else [1]
            choices = product(experts, divisors(batch // data), ways)
            for expert, micro_batch, (recompute, sequence, zero1) in choices:
                uneven = sequence and (tensor == 1 or shape.seq // context % tensor)
                if uneven or (zero1 and data * context == 1):
                    continue
                layout = replace(
                    like, tensor=tensor, data=data, micro_batch=micro_batch,
                    micro_batches=batch // data // micro_batch, recompute=recompute, sequence_parallel=sequence,
                    zero1=zero1, pipeline=stages, context=context, method=method, expert=expert,
                )  # fmt: skip
                with suppress(ValueError):  # as many stages, or such chunks, do not fit
                    stage_chunks(layout, shape.layers)
                    yield layout


def plan(
    shape: TransformerShape,
    cluster: Cluster,
    gpus: int,
    batch: int,
    *,
    fixed: Mapping[str, Any] | None = None,
    reserve: float = 2e9,
    like: StepLayout | None = None,
    methods: Sequence[str] = SHARING,
) -> list[Candidate]:
    """All candidates: first those that fit, fastest first; then the others, least memory first.

    fixed: values that are not searched, by the keys of SEARCHED. reserve: bytes that a device keeps for CUDA's
    context, NCCL's buffers and workspaces. like: a layout with the dropout of the step. methods: of `layouts`. Raises
    ValueError if nothing divides, or if ``fixed`` leaves no layout.
    """
    room = cluster.device.memory_bytes - reserve
    chosen = list(layouts(shape, gpus, batch, like or StepLayout(), methods, (fixed or {}).get("context", 1)))
    if not chosen and like and like.chunk_layers:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {like.chunk_layers}: no layout can have such chunks; they must "
            f"divide the layers of a stage; valid at best: {', '.join(map(str, divisors(shape.layers)))}"
        )
    if not chosen:
        raise ValueError(
            f"no way to split {shape.heads} heads, hidden size {shape.hidden}, vocabulary {shape.vocab} and a batch of "
            f"{batch} over {gpus} devices: the tensor-parallel size must divide the first three and the number of "
            f"devices, the data-parallel size the batch, and a pipeline has at most {shape.layers} stages"
        )
    found = []
    for layout in _different(_narrowed(chosen, fixed or {}), cluster):
        step = predict(shape, layout, cluster)
        found.append(Candidate(layout, step, step.memory_total <= room))
    fitting = sorted((one for one in found if one.fits), key=lambda one: one.step.total)
    others = sorted((one for one in found if not one.fits), key=lambda one: one.step.memory_total)
    split = {replace(one.layout, zero1=False) for one in fitting if one.layout.zero1}
    result = [replace(one, why="" if one is fitting[0] else _slower(one.step, fitting[0].step)) for one in fitting]
    return result + [
        replace(one, why=_too_large(one.step, room) + ("; fits with ZeRO-1" if one.layout in split else ""))
        for one in others
    ]


def _different(chosen: list[StepLayout], cluster: Cluster) -> list[StepLayout]:
    """Without the layouts that are another one in all that counts.

    With a fused kernel attention keeps no scores, so "selective" has nothing to save: it is "none", and computes
    attention twice.
    """
    there = set(chosen)
    return [
        one
        for one in chosen
        if one.recompute != "selective"
        or kept_tensors(one, cluster).scores != "none"
        or replace(one, recompute="none") not in there
    ]


def _narrowed(chosen: list[StepLayout], fixed: Mapping[str, Any]) -> list[StepLayout]:
    """The layouts with the fixed values.

    Raises ValueError that names the first option that leaves none, and its valid values.
    """
    said = ""
    for field, value in fixed.items():
        kept = [one for one in chosen if getattr(one, field) == value]
        option = _spelled(field, value)
        if not kept:
            there = sorted({getattr(one, field) for one in chosen})
            valid = " or ".join(_spelled(field, one) for one in there) if isinstance(value, bool) else there
            raise ValueError(f"{option}: no layout that divides has it{said and f' with{said}'}; valid: {valid}")
        chosen, said = kept, f"{said} {option}"
    return chosen


def _spelled(field: str, value: Any) -> str:
    option = SEARCHED[field]
    if isinstance(value, bool):
        return option if value else option.replace("--", "--no-", 1)
    return f"{option} {value}"


def _slower(step: PredictedStep, best: PredictedStep) -> str:
    """How much slower the step is, and which part grew most."""
    more = {part: step.seconds.get(part, 0) - best.seconds.get(part, 0) for part in {**best.seconds, **step.seconds}}
    part = max(more, key=lambda name: more[name])
    return (
        f"{100 * (step.total / best.total - 1):.1f}% slower, most by {part.replace('_', ' ')} "
        f"(+{1e3 * more[part]:.0f} ms a step)"
    )


def _too_large(step: PredictedStep, room: float) -> str:
    largest = max(step.memory, key=lambda name: step.memory[name])
    return (
        f"does not fit: {step.memory_total / 1e9:.1f} GB of {room / 1e9:.1f}, most of it {largest} "
        f"({step.memory[largest] / 1e9:.1f})"
    )


def table(candidates: list[Candidate], top: int) -> Iterator[str]:
    """Yield markdown: the winner and the ``top`` best of the rest.

    Of the layouts that do not fit, it has at least the three closest.
    """
    fitting = [one for one in candidates if one.fits]
    others = [one for one in candidates if not one.fits]
    shown = fitting[:top] + others[: max(3, top - len(fitting))]
    yield (
        "| tensor | context | data | pipeline | micro-batch | recompute | sequence parallel | ZeRO-1 | s a step "
        "| TFLOP/s computed | waiting | bubble | memory, GB | why not |"
    )
    yield "|---:|---|---:|---:|---:|---|---|---|---:|---:|---:|---:|---:|---|"
    for one in shown:
        layout, step = one.layout, one.step
        shared = f"{layout.context} {layout.method}" if layout.context > 1 else "1"
        data = f"{layout.data}, experts over {layout.expert}" if layout.expert > 1 else layout.data
        split = f"{layout.tensor} | {shared} | {data} | {layout.pipeline} "
        split += f"| {layout.micro_batch} x {layout.micro_batches} | {layout.recompute}"
        sequence, zero1 = ("yes" if on else "no" for on in (layout.sequence_parallel, layout.zero1))
        memory, experts = step.memory_total / 1e9, step.memory.get("experts and their optimizer", 0) / 1e9
        yield (
            f"| {split} | {sequence} | {zero1} | {step.total:.3f} | {tflops(step.computed_per_device)} "
            f"| {100 * step.communication:.0f}% | {100 * step.seconds.get('bubble', 0) / step.total:.0f}% "
            f"| {memory:.1f}{f', {experts:.1f} of them experts' if experts else ''} | {one.why or '**fastest**'} |"
        )
    yield ""
    yield (
        f"{len(candidates)} different layouts divide, {len(fitting)} fit, {len(shown)} are shown. ZeRO-1 is "
        "--use-distributed-optimizer."
    )
