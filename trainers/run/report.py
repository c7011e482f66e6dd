"""The end of a run: a report for people, report.json for programs, and the loss curve."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from commengine.rank_zero import on_rank_zero
from commengine.trace import Total
from trainers.checkpoints import disk, pointer
from trainers.checkpoints.run_folder import REPORT
from trainers.data.batches import GlobalBatches
from trainers.training.trainer import Step, Trainer

from .evaluation import Evaluation, total
from .experts import Tokens, draw, expert_lines
from .metrics import Metrics, as_json
from .task import Remarks, TrainingTask

#: the line of a report whose model loses against the simplest one
WORSE = (
    "THE MODEL IS WORSE THAN THE UNIGRAM MODEL: how often each token occurs predicts this text better than the model "
    "does, which sees other tokens of the text, too. Train longer, or look at the data and the learning rate."
)


@dataclass
class Course:
    """The steps that this process has done: the last one, and the seconds of all and of the traced ones."""

    step: Step | None = None
    seconds: list[float] = field(default_factory=list)
    traced: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Report(Remarks):
    """The outcome of a run, with the task's `Remarks`. Losses are in the objective's unit (`Objective.unit`).

    "Held-out" means: of the validation split.

    train_loss: of the last step. validation_loss: of the last evaluation; token_loss, validation_tokens: of its first
    term, which for GPT is all of it. tokens_per_second: of the median step. communication: of rank 0 in the traced
    steps (`communication_rows`; ``--log-communication-interval``). step_seconds: of all steps together. traced_seconds:
    of the ``traced_steps``. loss_scale: of an fp16 run. sources: for each data set of a blend its name, weight, samples
    and epochs read, and held-out loss; empty for one data set. expert_tokens: [layer][expert], how many tokens had the
    expert in the last interval of the metrics; empty without experts.
    """

    iteration: int
    parameters: int
    tensor_model_parallel_size: int
    data_parallel_size: int
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    train_loss: float | None
    validation_loss: float | None
    token_loss: float | None = None
    validation_tokens: int
    tokens_per_second: float
    communication: list[dict[str, Any]]
    step_seconds: float
    traced_steps: int = 0
    traced_seconds: float = 0.0
    loss_scale: float | None = None
    skipped_steps: int = 0
    sources: list[dict[str, Any]] = field(default_factory=list)
    expert_tokens: Tokens = ()

    def text(self, unit: str) -> str:
        """The report for people. unit: of the losses, such as "nats/token"."""
        item = unit.partition("/")[2] or "item"
        stages, parts = self.pipeline_model_parallel_size, self.context_parallel_size
        layout = f"tensor {self.tensor_model_parallel_size} x data {self.data_parallel_size}"
        layout += f" x context {parts}" if parts > 1 else ""
        layout += f" x pipeline {stages}" if stages > 1 else ""
        layout += f", in expert groups of {self.expert_model_parallel_size}" * (self.expert_model_parallel_size > 1)
        lines = [f"{self.iteration} steps, {_count(self.parameters)} parameters, {layout}", ""]
        several = self.token_loss is not None and self.token_loss != self.validation_loss
        unit_of_all, terms = (unit.partition("/")[0], ", the sum of all terms") if several else (unit, "")
        if self.train_loss is not None:
            lines.append(f"training loss             {self.train_loss:8.4f} {unit_of_all} (the last step{terms})")
        if self.validation_loss is not None:
            items = f"{self.validation_tokens:,} {item}s"
            lines.append(f"held-out loss             {self.validation_loss:8.4f} {unit_of_all} over {items}{terms}")
            lines += [f"{name.replace('_', ' '):<26}{_number(value):>8}" for name, value in self.measures.items()]
            if self.unigram_entropy is not None and self.token_loss is not None:
                gain = self.unigram_entropy - self.token_loss
                said = f"the model is {abs(gain):.4f} {'below' if gain >= 0 else 'above'}"
                lines.append(f"unigram model, same text  {self.unigram_entropy:8.4f} {unit}: {said}")
                if gain < 0:
                    lines.append(WORSE)
        if self.loss_scale is not None:
            scale = f"the loss scale is {self.loss_scale:g}"
            lines.append(f"skipped steps             {self.skipped_steps:8,} of {self.iteration:,}: {scale}")
        lines.append(f"throughput                {self.tokens_per_second:8,.0f} tokens/s (median step)")
        if self.sources:
            lines += ["", *self._sources()]
        if self.expert_tokens:
            lines += ["", *expert_lines(self.expert_tokens)]
        lines += ["", self._communication_heading(), *self._communication(), ""]
        if self.sample:
            both = [self.sample_prompt, self.sample] if self.completes else [f"[{self.sample_prompt}]{self.sample}"]
            lines += ["sample", *(f"  {text}" for text in both), ""]
        return "\n".join(lines)

    def _sources(self) -> list[str]:
        width = max(len("data"), *(len(source["name"]) for source in self.sources))
        lines = [f"  {'data':<{width}}{'weight':>9}{'samples':>13}{'epochs':>9}{'held-out loss':>15}"]
        for source in self.sources:
            epochs = "-" if source["epochs"] is None else f"{source['epochs']:.3f}"
            loss = "-" if source["validation_loss"] is None else f"{source['validation_loss']:.4f}"
            lines.append(
                f"  {source['name']:<{width}}{source['weight']:>9.4f}{source['samples']:>13,}{epochs:>9}{loss:>15}"
            )
        return lines

    def _communication_heading(self) -> str:
        steps = "training steps" if self.traced_seconds == self.step_seconds else f"{self.traced_steps:,} traced steps"
        return f"communication of rank 0 in {steps}"

    def _communication(self) -> list[str]:
        if not self.communication:
            return ["  none: one rank" if self.traced_steps else "  not traced"]
        lines = [f"  {'group':<15}{'operation':<16}{'count':>9}{'MB':>11}{'seconds':>9}{'of steps':>10}{'hidden':>8}"]
        for row in self.communication:
            share = row["seconds"] / self.traced_seconds if self.traced_seconds else 0.0
            hidden = row["hidden_seconds"] / row["seconds"] if row["seconds"] else 0.0
            name = f"{row['group']} ({row['size']})"
            lines.append(
                f"  {name:<15}{row['operation']:<16}{row['count']:>9}{row['bytes'] / 1e6:>11.1f}"
                f"{row['seconds']:>9.2f}{share:>10.1%}{hidden:>8.0%}"
            )
        return lines

    def save(self, folder: Path, rows: list[dict[str, Any]], losses: Sequence[str], unit: str) -> None:
        """Write report.json, report.txt and loss.png into ``folder``.

        rows: of metrics.jsonl. losses: their keys that are training losses. unit: of the losses, as for `text`.
        """
        values = {name: as_json(value) for name, value in asdict(self).items() if name not in ("measures", "completes")}
        values |= {name: as_json(value) for name, value in self.measures.items()}
        disk.remove(folder / REPORT[0])  # while it is there, the other files are of the same steps
        (folder / "report.txt").write_text(self.text(unit))
        _plot(folder / "loss.png", rows, losses, unit, self.unigram_entropy)
        if self.expert_tokens:
            draw(folder / "experts.png", rows, self.expert_tokens)
        # Last and at once: if report.json is there, the report is complete.
        disk.rewrite(folder / REPORT[0], (json.dumps(values, indent=1) + "\n").encode())


def report(
    task: TrainingTask, metrics: Metrics, folder: Path | None, course: Course, evaluated: Evaluation | None,
    communication: list[dict[str, Any]], expert_tokens: Tokens = (),
) -> None:  # fmt: skip
    """Print the report, and write it into ``folder``. Collective over the trainer's world; rank 0 prints and writes.

    A run that was ended before its report and does no step any more takes the losses and the throughput of its steps
    from its metrics. Raises UsageError, on all ranks, where rank 0 cannot write a file.
    """
    trainer = task.trainer
    trainer.optimizer.wait_for_parameters()
    means = None if evaluated is None else evaluated.means
    first = None if means is None else next(iter(means.values()))
    remarks = dict(vars(task.remarks(means)))
    saved = folder is not None and task.kept_by is not None  # without a folder no checkpoint is kept
    if saved and (kept := metrics.best(f"validation_{task.kept_by}", among=kept_iterations(folder))) is not None:
        remarks["measures"] = {**remarks["measures"], f"kept_{task.kept_by}": kept[0], "kept_iteration": kept[1]}
    train_loss, speed = _from_rows(trainer, metrics)
    if course.step is not None:
        train_loss = course.step.loss
        speed = trainer.batches.size * task.tokens_per_sample / statistics.median(course.seconds)
    made = Report(
        **remarks,
        iteration=trainer.iteration,
        parameters=trainer.parameters(),
        tensor_model_parallel_size=trainer.grid.tensor.size,
        data_parallel_size=trainer.grid.data.size,
        pipeline_model_parallel_size=trainer.grid.pipeline.size,
        context_parallel_size=trainer.grid.context.size,
        expert_model_parallel_size=trainer.grid.expert.size,
        train_loss=train_loss,
        validation_loss=None if means is None else total(means),
        token_loss=None if first is None else first.loss,
        validation_tokens=0 if first is None else first.items,
        tokens_per_second=speed,
        communication=communication,
        step_seconds=sum(course.seconds),
        traced_steps=len(course.traced),
        traced_seconds=sum(course.traced),
        loss_scale=trainer.loss_scale if trainer.config.fp16 else None,
        skipped_steps=trainer.skipped,
        sources=_sources(trainer, evaluated),
        expert_tokens=expert_tokens,
    )

    def publish() -> None:
        metrics.close()
        unit = trainer.objective.unit
        print("\n" + made.text(unit), flush=True)
        if folder is not None:
            made.save(folder, metrics.rows, trainer.objective.names, unit)
            pictures = "loss.png, experts.png" if made.expert_tokens else "loss.png"
            print(f"written to {folder}: report.json, report.txt, {pictures}, metrics.jsonl, checkpoints", flush=True)

    on_rank_zero(trainer.grid.world, publish)


def kept_iterations(folder: Path | None) -> set[int] | None:
    """The iterations of the checkpoints in ``folder``; None without a folder, where no checkpoint is kept."""
    return None if folder is None else {pointer.iteration_of(path) or 0 for path in pointer.history(folder)}


def _from_rows(trainer: Trainer, metrics: Metrics) -> tuple[float | None, float]:
    """The training loss of the trainer's iteration, if it was logged, and the median throughput of the logged steps."""
    steps = {row["iteration"]: row for row in metrics.rows if row.get("tokens_per_second") is not None}
    loss = None
    if (last := steps.get(trainer.iteration)) is not None:
        loss = sum(math.nan if last.get(name) is None else last[name] for name in trainer.objective.names)
    speeds = [row["tokens_per_second"] for row in steps.values()]
    return loss, statistics.median(speeds) if speeds else 0.0


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


def _count(number: int) -> str:
    """A number in the unit that leaves it at least one digit before the point: 25.4 k, 4.2 M, 8.3 B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.99995 * size:  # what rounds to 1.0
            return f"{number / size:.1f} {unit}"
    return str(number)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def communication_rows(totals: list[Total]) -> list[dict[str, Any]]:
    """The trace's totals for groups of more than one rank, as JSON types."""
    return [asdict(total) for total in totals if total.size > 1]


def _plot(
    path: Path, rows: list[dict[str, Any]], losses: Sequence[str], unit: str, unigram_entropy: float | None
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="iteration", ylabel=unit.replace("/", " per "))
    curves = [(name, "training" if len(losses) == 1 else f"training, {name}", "-") for name in losses]
    held_out = [("validation_loss", "held-out", "o-")]
    if len(losses) > 1:  # each beside its own training loss, not their sum
        held_out = [(f"validation_{name}", f"held-out, {name}", "o-") for name in losses]
    for key, label, style in (*curves, *held_out):
        points = [(row["iteration"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, linestyle=":", color="grey", label="unigram model")
    if axes.has_data():
        figure.legend(loc="outside lower center", ncols=3, frameon=False)  # below: it covers no line
    figure.savefig(path, dpi=120)
