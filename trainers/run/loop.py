"""A run from its first step to its report: train, evaluate, save."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from commengine import Communicator, trace
from commengine.rank_zero import on_every_rank, on_rank_zero
from trainers.checkpoints import run_folder, run_state
from trainers.config import TrainConfig
from trainers.data.batches import GlobalBatches
from trainers.options import make_writable
from trainers.training.compiler import require_compiler
from trainers.training.trainer import Step, Trainer

from .evaluation import Evaluation, HeldOut, Mean, evaluate_sources, total
from .metrics import Metrics
from .report import Remarks, Report, communication_rows
from .step_file import StepFile


class TrainingTask(Protocol):
    """What `train` runs: a trainer, what it is evaluated on, and what a report says besides its losses.

    `trainers.tasks.gpt.GPTTask` is an example.
    """

    @property
    def trainer(self) -> Trainer:
        """A trainer with a new model. `train` resumes it if there is a checkpoint, and closes it."""

    @property
    def held_out(self) -> Sequence[HeldOut]:
        """The sources of the evaluation; empty for no evaluation."""

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of a sample, for the throughput."""

    def remarks(self, evaluated: Mapping[str, Mean] | None) -> Remarks:
        """The task's own part of the report, after training. Collective over the trainer's world.

        evaluated: the terms of the last evaluation (`Evaluation`), or None without evaluation.
        """


Config = TypeVar("Config", bound=TrainConfig)


def train(
    config: Config, world: Communicator, new_task: Callable[[Config, Communicator], TrainingTask]
) -> Report | None:
    """Train until ``--train-iters`` (or ``--exit-interval``), evaluate, save, report. Collective over ``world``.

    config: valid and complete (`trainers.run.startup.read_config`). new_task: called with these arguments, on every
    rank, to make the task.

    If the checkpoint is at ``--train-iters`` already, it says so, leaves all files as they are and returns None. Raises
    UsageError, on all ranks, where an option or a file does not fit.
    """
    on_rank_zero(world, lambda: run_folder.require_free(config))
    if config.compile:
        on_every_rank(world, require_compiler)
    task = new_task(config, world)
    trainer = task.trainer
    resumed = run_state.resume(trainer)
    first = world.rank == 0
    if trainer.iteration >= config.train_iters:
        if first:
            print(
                f"nothing to train: the checkpoint in {config.load} is at iteration {trainer.iteration}, --train-iters "
                f"is {config.train_iters}; files are left as they are",
                flush=True,
            )
        trainer.close()
        return None
    folder = Path(config.save) if config.save else None
    if folder is not None:
        on_rank_zero(world, lambda: make_writable("--save", folder))
    if config.tensorboard_dir:
        on_rank_zero(world, lambda: make_writable("--tensorboard-dir", Path(config.tensorboard_dir or "")))
    on_rank_zero(world, lambda: run_folder.clear(config))  # last, when nothing can be refused any more
    board = Path(config.tensorboard_dir) if config.tensorboard_dir else (folder / "tensorboard" if folder else None)
    metrics = Metrics(folder, trainer.iteration, config.train_iters, tensorboard=board, active=first)
    if config.load is not None:
        for line in resumed or [f"starting from a new run: no checkpoint in {config.load}"]:
            metrics.say(line)
    try:
        report = _train(task, metrics, folder)
    finally:
        metrics.close()
    trainer.close()  # not after an exception: it is collective, and the other ranks may be in another call
    return report


def _train(task: TrainingTask, metrics: Metrics, folder: Path | None) -> Report:
    trainer = task.trainer
    config, grid = trainer.config, trainer.grid
    batch_tokens = trainer.batches.size * task.tokens_per_sample
    step_times: list[float] = []
    traced_times: list[float] = []
    step: Step | None = None
    evaluated: Evaluation | None = None
    saved = evaluated_at = trainer.iteration if trainer.iteration else -1
    begun = StepFile(Path(config.step_file) if config.step_file and grid.world.rank == 0 else None)
    with trace(grid.tensor, grid.data) as log:
        for iteration in _iterations(trainer):
            traced = config.log_communication_interval > 0 and iteration % config.log_communication_interval == 0
            with contextlib.nullcontext() if traced else log.paused():
                begun.begin(iteration)
                began = time.perf_counter()
                step = trainer.step()
                step_times.append(time.perf_counter() - began)
            if traced:
                traced_times.append(step_times[-1])
                log.settle()
            speed = batch_tokens / step_times[-1]
            metrics.progress(step.loss, speed)
            if iteration % config.log_interval == 0 or iteration == config.train_iters:
                metrics.log(
                    {"iteration": iteration, **step.losses, "grad_norm": None if step.skipped else step.norm,
                     "learning_rate": step.rate, "tokens_per_second": speed, "iteration_ms": 1e3 * step_times[-1]}
                    | ({"loss_scale": trainer.loss_scale, "skipped": trainer.skipped} if config.fp16 else {})
                )  # fmt: skip
            with log.paused():
                if iteration % config.eval_interval == 0:
                    evaluated, evaluated_at = _evaluate(task, metrics), iteration
                if config.save_interval and iteration % config.save_interval == 0:
                    run_state.save(trainer)
                    saved = iteration
    begun.close()
    if evaluated_at != trainer.iteration or evaluated is None:
        evaluated = _evaluate(task, metrics)
    if folder is not None and saved != trainer.iteration:
        run_state.save(trainer)
    return _report(task, metrics, folder, step, evaluated, step_times, traced_times, communication_rows(log.totals()))


def _iterations(trainer: Trainer) -> Iterator[int]:
    """The numbers, from 1, of the steps to come; each must be done before the next is asked for."""
    while trainer.iteration < trainer.config.train_iters:
        yield trainer.iteration + 1
        if trainer.config.exit_interval and trainer.iteration % trainer.config.exit_interval == 0:
            return


def _evaluate(task: TrainingTask, metrics: Metrics) -> Evaluation | None:
    """Each term's mean on the held-out samples, logged; None if there is no evaluation."""
    trainer = task.trainer
    if not task.held_out:
        return None
    trainer.optimizer.wait_for_parameters()
    found = evaluate_sources(trainer.model, trainer.objective, task.held_out, trainer.grid.data)
    loss, iteration = total(found.means), trainer.iteration
    terms = {f"validation_{name}": mean.loss for name, mean in found.means.items()} if len(found.means) > 1 else {}
    if len(found.by_source) > 1:
        terms |= {f"validation_loss/{name}": total(means) for name, means in found.by_source.items()}
    metrics.log({"iteration": iteration, "validation_loss": loss} | terms)
    metrics.say(f"iteration {iteration}: held-out loss {loss:.4f} {trainer.objective.unit}")
    return found


def _report(
    task: TrainingTask, metrics: Metrics, folder: Path | None, step: Step | None,
    evaluated: Evaluation | None, step_times: list[float], traced_times: list[float],
    communication: list[dict[str, Any]],
) -> Report:  # fmt: skip
    """The report, printed and written by rank 0."""
    trainer = task.trainer
    config = trainer.config
    batch_tokens = trainer.batches.size * task.tokens_per_sample
    trainer.optimizer.wait_for_parameters()
    means = None if evaluated is None else evaluated.means
    remarks = task.remarks(means)
    report = Report(
        iteration=trainer.iteration,
        parameters=trainer.parameters(),
        tensor_model_parallel_size=trainer.grid.tensor.size,
        data_parallel_size=trainer.grid.data.size,
        train_loss=None if step is None else step.loss,
        validation_loss=None if means is None else total(means),
        unigram_entropy=remarks.unigram_entropy,
        validation_tokens=0 if means is None else next(iter(means.values())).items,
        tokens_per_second=batch_tokens / statistics.median(step_times) if step_times else 0.0,
        sample_prompt=remarks.sample_prompt,
        sample=remarks.sample,
        communication=communication,
        step_seconds=sum(step_times),
        traced_steps=len(traced_times),
        traced_seconds=sum(traced_times),
        loss_scale=trainer.loss_scale if config.fp16 else None,
        skipped_steps=trainer.skipped,
        sources=_sources(trainer, evaluated),
        token_loss=None if means is None else next(iter(means.values())).loss,
        measures=remarks.measures,
        completes=remarks.completes,
    )
    if trainer.grid.world.rank == 0:
        metrics.close()
        print("\n" + report.text(trainer.objective.unit), flush=True)
        if folder is not None:
            report.save(folder, metrics.rows, trainer.objective.names, trainer.objective.unit)
            print(f"written to {folder}: report.json, report.txt, loss.png, metrics.jsonl, checkpoints", flush=True)
    return report


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
