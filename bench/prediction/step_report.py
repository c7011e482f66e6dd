"""A predicted step in words, and in numbers for --json."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench.clusters.cluster import Cluster
from bench.prediction.layout import stage_chunks
from bench.prediction.model_cost import predict
from bench.prediction.predicted_step import PredictedStep
from tplayers.formulas import StepLayout, TransformerShape, parameters, stages


def describe(shape: TransformerShape, layout: StepLayout, cluster: Cluster) -> tuple[list[str], dict[str, Any]]:
    """One step: the lines for people, and the numbers for --json."""
    step = predict(shape, layout, cluster)
    alone = predict(shape, _alone(layout), cluster)
    efficiency = step.flops_per_device / alone.flops_per_device
    room = cluster.device.memory_bytes
    shared = f" x context {layout.context} ({layout.method})" if layout.context > 1 else ""
    pipeline = f" x pipeline {layout.pipeline}" if layout.pipeline > 1 else ""
    experts = f", in expert groups of {layout.expert}" if layout.expert > 1 else ""
    lines = [
        f"{parameters(shape) / 1e9:.2f} billion parameters on {layout.ranks} x {cluster.device.name} ({cluster.name}), "
        f"tensor {layout.tensor} x data {layout.data}{shared}{pipeline}{experts}, batch {layout.batch} in "
        f"micro-batches of {layout.micro_batch}, recompute {layout.recompute}"
        f"{', sequence parallel' if layout.sequence_parallel else ''}"
        f"{', distributed optimizer' if layout.zero1 else ''}",
        "",
        f"- step: {step.total:.3f} s; {tflops(step.computed_per_device)} TFLOP/s a device are computed, "
        f"{100 * step.computed_per_device / cluster.device.peak_flops:.0f}% of peak; Megatron-LM would count "
        f"{tflops(step.flops_per_device)}, with causal attention's whole square (both with recomputed FLOPs)",
        f"- scaling efficiency: {100 * efficiency:.0f}% of the same model and micro-batches on one device, did it fit",
        f"- communication that is waited for: {100 * step.communication:.1f}% of the step"
        + (f"; hidden under backward: {1e3 * step.hidden:.0f} ms" if step.hidden else ""),
        *_pipeline(shape, layout, step),
        f"- memory a device{f' of stage {step.fullest}, the fullest' if pipeline else ''}: "
        f"{step.memory_total / 1e9:.1f} GB of {room / 1e9:.1f}"
        + ("" if step.memory_total <= room else ": **does not fit**"),
        *(f"  - {name}: {size / 1e9:.2f} GB" for name, size in step.memory.items()),
        "",
        "| part | ms a step | share |",
        "|---|---:|---:|",
        *(
            f"| {part.replace('_', ' ')} | {1e3 * spent:.1f} | {100 * spent / step.total:.1f}% |"
            for part, spent in step.seconds.items()
        ),
        "",
        f"- {calibration(cluster)}",
    ]  # fmt: skip
    return lines, numbers_of(step) | {"scaling_efficiency": efficiency}


def _alone(layout: StepLayout) -> StepLayout:
    return replace(
        layout,
        tensor=1,
        data=1,
        sequence_parallel=False,
        zero1=False,
        pipeline=1,
        chunk_layers=None,
        scattered=False,
        context=1,
        expert=1,
    )


def _pipeline(shape: TransformerShape, layout: StepLayout, step: PredictedStep) -> Iterator[str]:
    """Yield the line of a pipeline: what its stages have, and how long the busiest one waits for others."""
    if layout.pipeline == 1:
        return
    chunks = stage_chunks(layout, shape.layers)
    cut = stages(shape, layout.pipeline, chunks, layout.recompute)
    counts = sorted({sum(one.layers for one in own) for own in cut})
    yield (
        f"- pipeline: {layout.pipeline} stages of {' to '.join(map(str, {counts[0], counts[-1]}))} layers in {chunks} "
        f"chunk{'s' if chunks > 1 else ''}, {layout.micro_batches} micro-batches; bubble: "
        f"{100 * step.seconds['bubble'] / step.total:.1f}% of the step"
    )


def tflops(flops: float) -> str:
    """FLOP/s as TFLOP/s, in three significant digits or more: "0.0891", "39.0", "138"."""
    rate = flops / 1e12
    digits = 2 - math.floor(math.log10(rate)) if rate > 0 else 0
    return f"{rate:.{max(digits, 0)}f}"


def calibration(cluster: Cluster) -> str:
    """A sentence: whether a measured step has set the rates of the machine."""
    if (known := cluster.calibration) is not None:
        model = known.model if isinstance(known.model, str) else f"{parameters(known.model) / 1e6:.0f} M parameters"
        return (
            f"calibrated: {known.flops / 1e12:g} TFLOP/s were measured for {model}, micro-batch "
            f"{known.micro_batch}, recompute {known.recompute}"
        )
    links = "measured collectives" if cluster.fitted or cluster.measured else "the links of its file"
    return (
        f"not calibrated: no step was measured on {cluster.name}; the times follow from the rates of its file and from "
        f"{links} alone"
    )


def numbers_of(step: PredictedStep) -> dict[str, Any]:
    """The numbers of a step for --json."""
    return {
        "step_s": step.total, "flops_per_device": step.flops_per_device,
        "computed_flops_per_device": step.computed_per_device, "communication_share": step.communication,
        "seconds": step.seconds, "hidden_s": step.hidden, "memory_bytes": step.memory,
    } | ({"fullest_stage": step.fullest} if "bubble" in step.seconds else {})  # fmt: skip
