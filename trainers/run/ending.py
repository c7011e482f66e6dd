"""The end of a run: what its report says, from the trainer, the last evaluation and the steps."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commengine.rank_zero import on_rank_zero
from trainers.data.batches import GlobalBatches
from trainers.training.trainer import Step, Trainer

from .evaluation import Evaluation, total
from .metrics import Metrics
from .report import Report
from .stopping import TEMPORARY
from .task import TrainingTask


@dataclass
class Course:
    """The steps that this process has done: the last one, and the seconds of all and of the traced ones."""

    step: Step | None = None
    seconds: list[float] = field(default_factory=list)
    traced: list[float] = field(default_factory=list)


def report(
    task: TrainingTask, metrics: Metrics, folder: Path | None, course: Course, evaluated: Evaluation | None,
    communication: list[dict[str, Any]],
) -> None:  # fmt: skip
    """Print the report, and write it into ``folder``. Collective over the trainer's world; rank 0 prints and writes.

    A run that was ended before its report and does no step any more takes the losses and the throughput of its steps
    from its metrics. Raises UsageError, on all ranks, where rank 0 cannot write a file.
    """
    trainer = task.trainer
    trainer.optimizer.wait_for_parameters()
    means = None if evaluated is None else evaluated.means
    remarks = task.remarks(means)
    measures = dict(remarks.measures)
    saved = folder is not None and task.kept_by is not None  # without a folder no checkpoint is kept
    if saved and (kept := metrics.best(f"validation_{task.kept_by}")) is not None:
        measures |= {f"kept_{task.kept_by}": kept[0], "kept_iteration": kept[1]}
    train_loss, speed = _from_rows(trainer, metrics)
    if course.step is not None:
        train_loss = course.step.loss
        speed = trainer.batches.size * task.tokens_per_sample / statistics.median(course.seconds)
    made = Report(
        iteration=trainer.iteration,
        parameters=trainer.parameters(),
        tensor_model_parallel_size=trainer.grid.tensor.size,
        data_parallel_size=trainer.grid.data.size,
        train_loss=train_loss,
        validation_loss=None if means is None else total(means),
        unigram_entropy=remarks.unigram_entropy,
        validation_tokens=0 if means is None else next(iter(means.values())).items,
        tokens_per_second=speed,
        sample_prompt=remarks.sample_prompt,
        sample=remarks.sample,
        communication=communication,
        step_seconds=sum(course.seconds),
        traced_steps=len(course.traced),
        traced_seconds=sum(course.traced),
        loss_scale=trainer.loss_scale if trainer.config.fp16 else None,
        skipped_steps=trainer.skipped,
        sources=_sources(trainer, evaluated),
        token_loss=None if means is None else next(iter(means.values())).loss,
        measures=measures,
        completes=remarks.completes,
    )

    def publish() -> None:
        metrics.close()
        unit = trainer.objective.unit
        print("\n" + made.text(unit), flush=True)
        if folder is not None:
            made.save(folder, metrics.rows, trainer.objective.names, unit)
            print(f"written to {folder}: report.json, report.txt, loss.png, metrics.jsonl, checkpoints", flush=True)

    on_rank_zero(trainer.grid.world, publish)


def stopped(trainer: Trainer, reason: str, folder: Path | None, go_on: str | None) -> str:
    """The line that says that the run stopped early. folder: of ``--save``. go_on: as for `trainers.run.loop.train`."""
    config, iteration = trainer.config, trainer.iteration
    left = "the evaluation and the report are left" if iteration >= config.train_iters else ""
    at = f"stopped by {reason} after step {iteration} of {config.train_iters}" + (f" ({left})" if left else "")
    if folder is None:
        return f"{at}; nothing is saved, because there is no --save (exit status {TEMPORARY})"
    return f"{at}; the checkpoint is saved, go on with {go_on or f'--load {folder}'} (exit status {TEMPORARY})"


def _from_rows(trainer: Trainer, metrics: Metrics) -> tuple[float | None, float]:
    """The training loss of the trainer's iteration, if it was logged, and the median throughput of the logged steps."""
    steps = [row for row in metrics.rows if row.get("tokens_per_second") is not None]
    losses = [
        [math.nan if row.get(name) is None else row[name] for name in trainer.objective.names]
        for row in steps
        if row["iteration"] == trainer.iteration
    ]
    speeds = [row["tokens_per_second"] for row in steps]
    return (sum(losses[-1]) if losses else None), (statistics.median(speeds) if speeds else 0.0)


def _sources(trainer: Trainer, evaluated: Evaluation | None) -> list[dict[str, Any]]:
    """What the run read of each of its sources, and the held-out loss there; empty if it has read one source only."""
    if not isinstance(trainer.batches, GlobalBatches) or len(read := trainer.batches.sources(trainer.iteration)) == 1:
        return []
    held_out = {} if evaluated is None else {name: total(means) for name, means in evaluated.by_source.items()}
    return [
        {"name": source.name, "weight": float(source.probability), "samples": source.consumed,
         "epochs": source.epochs, "validation_loss": held_out.get(source.name) if source.probability else None}
        for source in sorted(read, key=lambda source: (-source.probability, source.name))
    ]  # fmt: skip
