"""The stages of a traced pipeline: how long each computes and waits, beside the formula of the bubble.

[P] Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021 (arXiv 2104.04473)
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from bench.step_study.spans import Span, chunk_of
from bench.step_study.traced_step import TracedStep
from commengine import GridLayout
from tplayers import ModelPart, formulas
from trainers.pipeline.orders import order
from trainers.settings import derived
from trainers.tasks.kinds import task_of

from .recorder import TracedConfig


def stage_rows(config: TracedConfig, ranks: Sequence[Sequence[TracedStep]]) -> list[dict[str, Any]]:
    """A row for each rank of a pipeline, with seconds of each step; none if there is one stage.

    pass: from the pipeline's first forward to its last backward. forward, backward: what the rank computes in it,
    recomputation with the backward. waits: the share of the pass in which it does not compute. formula: that share
    if all stages have the same work, (p - 1) / (v m + p - 1) [P, section 2.2]. scheduled: that share in the same
    schedule with the stages' own times and messages that take none, of the medians over the steps.
    """
    stages, chunks = config.pipeline_model_parallel_size, derived.chunks(config)
    if stages == 1:
        return []
    layout = GridLayout(len(ranks), config.tensor_model_parallel_size, pipeline=stages)
    microbatches = derived.batch_size(config, layout.data) // (config.micro_batch_size * layout.data)
    parts = task_of(config).parts()
    orders = [order(stage, stages, microbatches, chunks) for stage in range(stages)]
    free = formulas.bubble(stages, microbatches, chunks)
    rows = []
    for group in [layout.group(rank, "pipeline") for rank in range(len(ranks)) if layout.place(rank)["pipeline"] == 0]:
        spent = {rank: [_spent(step.spans, parts[stage]) for step in ranks[rank]] for stage, rank in enumerate(group)}
        lasted = [_pass([ranks[rank][number] for rank in group]) for number in range(len(ranks[0]))]
        seconds = {
            (stage, backward, chunk): statistics.median(step[backward, chunk] for step in spent[rank]) / microbatches
            for stage, rank in enumerate(group)
            for backward in (False, True)
            for chunk in range(chunks)
        }
        scheduled = formulas.timeline(orders, seconds)
        for stage, rank in enumerate(group):
            of_phase = {
                phase: [sum(step[backward, chunk] for chunk in range(chunks)) for step in spent[rank]]
                for phase, backward in (("forward", False), ("backward", True))
            }
            computed = zip(of_phase["forward"], of_phase["backward"], lasted, strict=True)
            rows.append({
                "rank": rank, "stage": stage, "layers": [[one.start, one.stop] for one in parts[stage].chunks],
                "microbatches": microbatches, **of_phase, "pass": lasted,
                "waits": [1 - (forward + backward) / whole for forward, backward, whole in computed],
                "formula": free / (1 + free), "scheduled": scheduled.idle(stage),
            })  # fmt: skip
    return sorted(rows, key=lambda row: row["rank"])


def _pass(steps: Sequence[TracedStep]) -> float:
    """The seconds from the first forward to the last backward of the ranks of one pipeline."""
    spans = [span for step in steps for span in step.spans if span.phase]
    return max(span.end for span in spans) - min(span.start for span in spans)


def _spent(spans: Sequence[Span], part: ModelPart) -> dict[tuple[bool, int], float]:
    """The seconds that a rank computes in a step, by (is a backward, chunk)."""
    found = {(backward, chunk): 0.0 for backward in (False, True) for chunk in range(len(part.chunks))}
    for span in spans:
        if span.phase:
            chunk = chunk_of(part, span.part)
            assert chunk is not None  # the rank has run it
            found[span.phase != "forward", chunk] += span.end - span.start
    return found


def stage_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield markdown: medians over the steps, of one rank of each stage."""
    first = rows[0]
    yield (
        f"A pass, from the first forward to the last backward, takes {_ms(first['pass'])} ms. Equal stages "
        f"wait {first['formula']:.1%} of it: (p - 1) / (v m + p - 1), Narayanan et al. 2021, section 2.2."
    )
    yield from (
        "",
        "| stage | layers | forward, ms | backward, ms | waits, share | with these times and free messages |",
    )
    yield "|---:|---|---:|---:|---:|---:|"
    shown = {row["stage"]: row for row in reversed(rows)}
    for stage, row in sorted(shown.items()):
        layers = ", ".join(f"{low}" if high == low + 1 else f"{low} to {high - 1}" for low, high in row["layers"])
        yield (
            f"| {stage} | {layers} | {_ms(row['forward'])} | {_ms(row['backward'])} "
            f"| {statistics.median(row['waits']):.1%} | {row['scheduled']:.1%} |"
        )


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f}"
