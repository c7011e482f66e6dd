"""The scaling figures of Shoeybi et al. 2019, published and predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.clusters.cluster import Cluster
from bench.prediction.layout import MODELS
from bench.prediction.model_cost import PARTS, predict, slowdown
from bench.prediction.paper_2021 import Throughput
from bench.prediction.predicted_step import PredictedStep
from commengine.cost import Link
from tplayers.formulas import StepLayout

FIGURE_5 = (("1.2b", 1), ("2.5b", 2), ("4.2b", 4), ("8.3b", 8))  # Table 1: model, GPUs that share it
SECTIONS = {
    "figure5-mp": "Figure 5, model parallel (weak scaling, %)",
    "figure5-mp-dp": "Figure 5, model + data parallel (weak scaling, %)",
    "table7": "Table 7, attention heads (8.3 billion parameters on 8 GPUs, %)",
    "table8": "Table 8, strong scaling (1.2 billion parameters, speed-up)",
}
# Not among the 13: Table 2's days per epoch of 68,507 iterations, batch 512, on t x 64 GPUs.
EPOCHS = (("355m", 16, 1, 0.86), ("2.5b", 20, 2, 2.27), ("8.3b", 24, 8, 2.10))
EPOCH_ITERATIONS = 68507
BOUNDS = (6.0, 12.0)  # mean and largest error, in points


@dataclass(frozen=True)
class Figure:
    """A published number and its prediction. error: in points; for a speed-up, that of speed-up / GPUs."""

    section: str
    case: str
    gpus: int
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """The predicted number minus the published one."""
        difference = self.predicted - self.published
        return difference / self.gpus * 100 if self.section == "table8" else difference


def figures(cluster: Cluster, off: str = "") -> list[Figure]:
    """All 13 figures, in the paper's order. off: the part of the model that is left out, one of `PARTS`.

    The batch is 8 for each model, and every layer's activations are recomputed (sections 4.2 and 5.1).
    """
    baseline = run(cluster, "1.2b", off=off)

    def efficiency(step: PredictedStep) -> float:
        return 100 * step.flops_per_device / baseline.flops_per_device

    found = []
    for (model, tensor), published in zip(FIGURE_5[1:], (95, 82, 77), strict=True):
        step = run(cluster, model, tensor, off=off)
        found.append(Figure("figure5-mp", f"{model.upper()}, {tensor} GPUs", tensor, published, efficiency(step)))
    for (model, tensor), published in zip(FIGURE_5, (96, 83, 79, 74), strict=True):
        step = run(cluster, model, tensor, data=64, off=off)
        gpus = 64 * tensor
        found.append(Figure("figure5-mp-dp", f"{model.upper()}, {gpus} GPUs", gpus, published, efficiency(step)))
    for heads, published in ((16, 82), (24, 80), (32, 77)):
        step = run(cluster, "8.3b", 8, heads=heads, off=off)
        found.append(Figure("table7", f"{heads} heads of {3072 // heads}", 8, published, efficiency(step)))
    for gpus, speed_up in ((2, 1.64), (4, 2.34), (8, 2.98)):
        step = run(cluster, "1.2b", gpus, off=off)
        found.append(Figure("table8", f"{gpus} GPUs", gpus, speed_up, baseline.total / step.total))
    return found


def run(
    cluster: Cluster, model: str, tensor: int = 1, *, data: int = 1, heads: int = 0, off: str = ""
) -> PredictedStep:
    """One of the paper's steps."""
    shape = replace(MODELS[model], heads=heads or MODELS[model].heads)
    return predict(shape, StepLayout(tensor=tensor, data=data, recompute="full"), cluster, off)


def errors(found: list[Figure]) -> tuple[float, float]:
    """The mean and the largest error, without signs."""
    sizes = [abs(one.error) for one in found]
    return sum(sizes) / len(sizes), max(sizes)


def as_json(found: Sequence[Figure | Throughput]) -> dict[str, list[dict[str, float]]]:
    """The figures by section, in the paper's order."""
    sections = dict.fromkeys(one.section for one in found)
    return {
        section: [{"published": one.published, "predicted": one.predicted} for one in found if one.section == section]
        for section in sections
    }


def table(found: list[Figure]) -> Iterator[str]:
    """Yield markdown: the 13 figures and their errors."""
    yield "| | case | published | predicted | error, points |"
    yield "|---|---|---:|---:|---:|"
    for one in found:
        form = ".2f" if one.section == "table8" else ".1f"
        published = f"{one.published:.2f}" if one.section == "table8" else f"{one.published:.0f}"
        yield f"| {SECTIONS[one.section]} | {one.case} | {published} | {one.predicted:{form}} | {one.error:+.1f} |"
    mean, largest = errors(found)
    yield ""
    verdict = "within" if mean <= BOUNDS[0] and largest <= BOUNDS[1] else "OUTSIDE"
    yield (
        f"Mean error {mean:.1f} points, largest {largest:.1f}: {verdict} the bounds of {BOUNDS[0]:g} and "
        f"{BOUNDS[1]:g}. Table 8's error is that of speed-up / GPUs x 100."
    )


def breakdown(cluster: Cluster) -> Iterator[str]:
    """Yield markdown: the parts of the time of the single-GPU step and of the model-parallel ones."""
    cases = [*((model, tensor, 1) for model, tensor in FIGURE_5), ("8.3b", 8, 64), ("1.2b", 8, 1)]
    steps = {
        f"{model.upper()} on {tensor * data}": run(cluster, model, tensor, data=data) for model, tensor, data in cases
    }
    yield f"| ms a step | {' | '.join(steps)} |"
    yield f"|---|{'---:|' * len(steps)}"
    for part in steps["1.2B on 1"].seconds:
        row = (f"{1e3 * step.seconds[part]:.0f}" for step in steps.values())
        yield f"| {part.replace('_', ' ')} | {' | '.join(row)} |"
    yield f"| **step** | {' | '.join(f'**{1e3 * step.total:.0f}**' for step in steps.values())} |"
    yield f"| TFLOP/s a GPU | {' | '.join(f'{step.flops_per_device / 1e12:.1f}' for step in steps.values())} |"


def epochs(cluster: Cluster) -> Iterator[str]:
    """Yield markdown: seconds of an iteration from Table 2, which the bounds do not cover."""
    yield "| Table 2 | GPUs | published, s an iteration | predicted | error |"
    yield "|---|---:|---:|---:|---:|"
    for model, heads, tensor, days in EPOCHS:
        published = days * 86400 / EPOCH_ITERATIONS
        step = run(cluster, model, tensor, data=64, heads=heads)
        yield (
            f"| {model.upper()}, {heads} heads | {64 * tensor} | {published:.2f} | {step.total:.2f} "
            f"| {100 * (step.total / published - 1):+.0f}% |"
        )


def ablation(cluster: Cluster) -> Iterator[str]:
    """Yield markdown: the 13 figures without one part of the model at a time, calibrated anew each time."""
    yield from _variants("model", [
        ("everything", cluster, ""),
        *((text, cluster, name) for name, text in PARTS.items()),
        ("reduction of gradients under backward", replace(cluster, overlap=True), ""),
        ("no calibration", replace(cluster, calibration=None), ""),
    ])  # fmt: skip


def sensitivity(cluster: Cluster) -> Iterator[str]:
    """Yield markdown: the same with other values of the constants that are least certain."""
    device, inside, between = cluster.device, cluster.machine.inside, cluster.machine.between

    def on(**changed: Any) -> Cluster:
        return replace(cluster, device=device.model_copy(update=changed))

    def linked(**changed: Any) -> Cluster:
        return replace(cluster, machine=replace(cluster.machine, **changed))

    cases = [
        ("as in the file", cluster),
        ("large GEMMs at 76% of peak (95 TFLOP/s of a 300 W V100)", on(gemm_efficiency=0.76)),
        ("large GEMMs at peak", on(gemm_efficiency=1.0)),
        ("the host issues an operator in 5 us", on(dispatch=5e-6)),
        ("the host issues an operator in 25 us", on(dispatch=25e-6)),
        ("the generator's state costs nothing (PyTorch 1.2)", on(random_state=0.0)),
        ("the generator's state at half of PCIe's rate (pageable memory)", on(random_state=2 * device.random_state)),
        ("LayerNorm as fast as other kernels", on(layernorm_efficiency=(device.memory_efficiency,) * 2)),
        ("L2 twice as fast", on(cache_bandwidth=2 * device.cache_bandwidth)),
        ("NVLink at 22 GB/s a link (an earlier NCCL's topo.h)", linked(inside=Link(inside.alpha, 1 / 132e9))),
        ("NVLink at 15 GB/s a link", linked(inside=Link(inside.alpha, 1 / 90e9))),
        ("InfiniBand at 10 GB/s an adapter", linked(between=Link(between.alpha, 1 / 10e9))),
    ]
    yield from _variants("constant", [(text, machine, "") for text, machine in cases])


def _variants(what: str, cases: Sequence[tuple[str, Cluster, str]]) -> Iterator[str]:
    """Yield a table of the 13 figures, a row for each case: its name, its machine, and the part that is left out."""
    (_, cluster, _), *_ = cases
    everything = figures(cluster)
    yield f"| {what} | memory slowed by | {' | '.join(_short(one) for one in everything)} | mean | largest |"
    yield f"|---|---:|{'---:|' * (len(everything) + 2)}"
    published = " | ".join(_value(one, one.published) for one in everything)
    yield f"| published | | {published} | | |"
    for text, machine, off in cases:
        try:
            found, slow = figures(machine, off), slowdown(machine, off)
        except ValueError:
            yield f"| {text} | cannot be calibrated |{' |' * (len(everything) + 2)}"
            continue
        mean, largest = errors(found)
        values = " | ".join(_value(one, one.predicted) for one in found)
        yield f"| {text} | {slow:.2f} | {values} | {mean:.1f} | {largest:.1f} |"


def _value(figure: Figure, value: float) -> str:
    return f"{value:.2f}" if figure.section == "table8" else f"{value:.0f}"


def _short(figure: Figure) -> str:
    if figure.section.startswith("table"):
        return f"T{figure.section[-1]} {figure.case.split()[0]}"
    return f"F5 {figure.gpus}"
