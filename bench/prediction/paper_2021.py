"""Table 1 of Narayanan et al. 2021 (arXiv 2104.04473), and its figures on schedules and micro-batches, predicted.

The paper's numbers are TFLOP/s of a GPU, with recomputed ones. Layouts are those of the authors' own scripts,
NVIDIA/Megatron-LM examples/sc21/: Table 1 does not say micro-batches and chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.clusters.cluster import Cluster
from bench.prediction.layout import MODELS
from bench.prediction.model_cost import predict, slowdown
from bench.prediction.predicted_step import PredictedStep
from tplayers.formulas import StepLayout, TransformerShape

# model, tensor size, pipeline size, GPUs, batch, micro-batch, layers of a chunk, published
TABLE_1 = (
    ("1.7b", 1, 1, 32, 512, 16, None, 137), ("3.6b", 2, 1, 64, 512, 16, None, 138),
    ("7.5b", 4, 1, 128, 512, 16, None, 142), ("18.4b", 8, 1, 256, 1024, 8, None, 135),
    ("39.1b", 8, 2, 512, 1536, 4, None, 138), ("76.1b", 8, 4, 1024, 1792, 2, 5, 140),
    ("145.6b", 8, 8, 1536, 2304, 2, 5, 148), ("310.1b", 8, 16, 1920, 2160, 1, 3, 155),
    ("529.6b", 8, 35, 2520, 2520, 1, 1, 163), ("1008b", 8, 64, 3072, 3072, 1, None, 163),
)  # fmt: skip
# Read off the plots, within some 3: by the layers of a chunk, of batches of 12, 24, 36, 48 and 60; and by the batch, of
# micro-batches of 1, 2, 4 and 8.
FIGURE_12 = {None: (82, 109, 122, 130, 135), 2: (119, 134, 141, 143, 146)}
FIGURE_16 = {128: (155, 158, 140, 120), 512: (163, 172, 160, 155)}
SHAPE_16 = TransformerShape(32, 15360, 128, 2048, 51200)
SCATTERED = 11  # percent that scattered messages gain at most: section 5.7


@dataclass(frozen=True)
class Throughput:
    """A published number and its prediction, in TFLOP/s of a GPU."""

    section: str
    case: str
    published: float
    step: PredictedStep

    @property
    def predicted(self) -> float:
        """The prediction of it."""
        return self.step.flops_per_device / 1e12

    @property
    def error(self) -> float:
        """Percent by which the prediction is above the published number."""
        return 100 * (self.predicted / self.published - 1)


def run(
    cluster: Cluster, shape: TransformerShape, tensor: int, pipeline: int, gpus: int, batch: int, micro: int,
    chunk: int | None = None, scattered: bool = True,
) -> PredictedStep:  # fmt: skip
    """One of the paper's steps. Without a pipeline it had torch's DDP, which overlaps the reduction of gradients."""
    data = gpus // (tensor * pipeline)
    layout = StepLayout(
        tensor=tensor, data=data, micro_batch=micro, micro_batches=batch // (data * micro), recompute="full",
        pipeline=pipeline, chunk_layers=chunk, scattered=scattered,
    )  # fmt: skip
    return predict(shape, layout, replace(cluster, overlap=pipeline == 1))


def table_1(cluster: Cluster) -> list[Throughput]:
    """The ten rows of Table 1."""
    found = []
    for model, tensor, stages, gpus, batch, micro, chunk, published in TABLE_1:
        step = run(cluster, MODELS[model], tensor, stages, gpus, batch, micro, chunk)
        found.append(Throughput("table1", f"{model.upper()} | {gpus} | {tensor} | {stages}", published, step))
    return found


def figures(cluster: Cluster) -> list[Throughput]:
    """Figure 12, interleaving on 96 GPUs, and Figure 16, micro-batches on 64."""
    found = []
    for chunk, row in FIGURE_12.items():
        name = "interleaved" if chunk else "1F1B"
        for batch, published in zip(range(12, 61, 12), row, strict=True):
            step = run(cluster, MODELS["175b"], 8, 12, 96, batch, 1, chunk)
            found.append(Throughput("figure12", f"{name}, batch {batch}", published, step))
    for batch, points in FIGURE_16.items():
        for micro, published in zip((1, 2, 4, 8), points, strict=True):
            step = run(cluster, SHAPE_16, 8, 8, 64, batch, micro)
            found.append(Throughput("figure16", f"batch {batch}, micro-batch {micro}", published, step))
    return found


def scattered_gain(cluster: Cluster) -> float:
    """The most percent that scattered messages gain in Figure 18, which is Figure 12 with chunks."""
    return max(
        100 * (whole.total / part.total - 1)
        for batch in range(12, 61, 12)
        for whole, part in [[run(cluster, MODELS["175b"], 8, 12, 96, batch, 1, 2, on) for on in (False, True)]]
    )


def lines(cluster: Cluster, rows: Sequence[Throughput], read: Sequence[Throughput]) -> Iterator[str]:
    """Yield the lines of --paper 2021: of `table_1` and `figures`."""
    yield (
        "One measured number, the 137 TFLOP/s of the first row, sets the rate at which kernels move memory: 1 / "
        f"{slowdown(cluster):.2f} of what a plain copy reaches. Everything else is published: see "
        "bench/clusters/selene.yaml."
    )
    yield from (
        "",
        "| Table 1 | GPUs | tensor | pipeline | published, TFLOP/s a GPU | predicted | error | bubble | GB |",
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for one in rows:
        bubble = 100 * one.step.seconds.get("bubble", 0.0) / one.step.total
        yield f"{_row(one)} {bubble:.1f}% | {one.step.memory_total / 1e9:.1f} |"
    yield from ("", _summary("The nine rows that are not calibrated to:", rows[1:]), "")
    yield "| Figures 12 and 16 | published, TFLOP/s a GPU | predicted | error |"
    yield "|---|---:|---:|---:|"
    yield from (_row(one) for one in read)
    yield from ("", _summary("These numbers are read off plots, within some 3:", read), "")
    yield (
        f"Scattered messages gain at most {scattered_gain(cluster):.1f}% in Figure 18's runs, as predicted; published "
        f"are {SCATTERED}%."
    )


def _row(one: Throughput) -> str:
    return f"| {one.case} | {one.published:.0f} | {one.predicted:.1f} | {one.error:+.1f}% |"


def _summary(which: str, rows: Sequence[Throughput]) -> str:
    sizes = [abs(one.error) for one in rows]
    optimistic = sum(one.error > 0 for one in rows)
    return (
        f"{which} mean error {sum(sizes) / len(sizes):.1f}%, largest {max(sizes):.1f}%; {optimistic} of {len(rows)} "
        "too optimistic."
    )
