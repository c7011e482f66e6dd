"""A run from its first step to its report: train, save, evaluate; and stop early where that is asked for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from commengine import Communicator, trace
from commengine.rank_zero import on_every_rank, on_rank_zero
from trainers.checkpoints import folder_lock, run_folder, run_state
from trainers.checks.in_run import InRunChecks
from trainers.config import TrainConfig
from trainers.options import make_writable
from trainers.training.compiler import require_compiler
from trainers.training.trainer import Trainer

from .ending import Course, report
from .evaluation import Evaluation, evaluate_sources, total
from .metrics import Metrics
from .report import communication_rows, is_written
from .step_agreement import StepAgreement
from .step_file import StepFile
from .stopping import TEMPORARY, StopRequests
from .task import TrainingTask

Config = TypeVar("Config", bound=TrainConfig)


class _EvaluationLeft(Exception):
    """Ends an evaluation on all ranks. Its argument says why the run stops (`StopRequests.reason`)."""


def train(
    config: Config,
    world: Communicator,
    new_task: Callable[[Config, Communicator], TrainingTask],
    stopping: StopRequests,
) -> int:
    """Train until ``--train-iters`` (or ``--exit-interval``), save, evaluate, report. Collective over ``world``.

    config: valid and complete (`trainers.run.startup.read_config`). new_task: called with these arguments, on every
    rank, to make the task. stopping: may stop the run after any step and between the batches of an evaluation; it then
    has a checkpoint, if there is ``--save``.

    Returns the exit status: 0, or `TEMPORARY` if the run stopped before its last step or before its report.

    If the checkpoint is at ``--train-iters`` already, the report is written if it is missing; otherwise the run says
    that there is nothing to train and leaves all files as they are. Raises UsageError, on all ranks, where an option or
    a file does not fit, or a file cannot be written.
    """
    agreement = StepAgreement(world)
    on_rank_zero(world, lambda: run_folder.require_free(config))
    if config.compile:
        on_every_rank(world, require_compiler)
    folder = Path(config.save) if config.save else None
    with contextlib.ExitStack() as held:
        locked = folder is not None and on_rank_zero(world, folder.is_dir)
        if folder is not None and locked:
            agreement.add_failure(held.enter_context(folder_lock.hold(world, folder)).problem)
            on_rank_zero(world, lambda: run_folder.require_free(config))  # another run may just have ended
        task = new_task(config, world)
        trainer = task.trainer
        resumed = run_state.resume(trainer)
        goes_on = on_rank_zero(world, lambda: run_folder.goes_on(config))
        if _is_done(trainer, folder, goes_on=goes_on):
            if world.rank == 0:
                print(
                    f"nothing to train: the checkpoint in {config.load} is at iteration {trainer.iteration}, "
                    f"--train-iters is {config.train_iters}; files are left as they are",
                    flush=True,
                )
            trainer.close()
            return 0
        if folder is not None:
            on_rank_zero(world, lambda: make_writable("--save", folder))
        if config.tensorboard_dir:
            on_rank_zero(world, lambda: make_writable("--tensorboard-dir", Path(config.tensorboard_dir or "")))
        if folder is not None and not locked:
            agreement.add_failure(held.enter_context(folder_lock.hold(world, folder)).problem)
            on_rank_zero(world, lambda: run_folder.require_new(config))
        on_rank_zero(world, lambda: run_folder.clear(config))  # last, when nothing can be refused any more
        board = Path(config.tensorboard_dir) if config.tensorboard_dir else (folder / "tensorboard" if folder else None)
        metrics = on_every_rank(
            world,
            lambda: Metrics(folder, trainer.iteration, config.train_iters, tensorboard=board, active=world.rank == 0),
        )
        if config.load is not None:
            for line in resumed or [f"starting from a new run: no checkpoint in {config.load}"]:
                metrics.say(line)
        if stopping.limit is not None:
            metrics.say(stopping.limit)
        try:
            status = _train(task, metrics, folder, agreement, stopping, goes_on=goes_on)
        finally:
            metrics.close()
        trainer.close()  # not after an exception: it is collective, and the other ranks may be in another call
    return status


def _is_done(trainer: Trainer, folder: Path | None, *, goes_on: bool) -> bool:
    """Whether the run has done its steps, and has its report if that belongs to this run. Collective."""
    iteration, last = trainer.iteration, trainer.config.train_iters
    if iteration == last and folder is not None and goes_on:
        return bool(on_rank_zero(trainer.grid.world, lambda: is_written(folder, iteration)))
    return iteration >= last


def _train(
    task: TrainingTask, metrics: Metrics, folder: Path | None, agreement: StepAgreement, stopping: StopRequests, *,
    goes_on: bool,
) -> int:  # fmt: skip
    """The steps and what follows them, as `train`. goes_on: the run continues in its own folder."""
    trainer = task.trainer
    config, grid = trainer.config, trainer.grid
    batch_tokens = trainer.batches.size * task.tokens_per_sample
    agreement.add("stop", stopping.reason)
    agreement.add_failure(metrics.problem)
    checks = InRunChecks(trainer, folder, metrics.say)
    agreement.add_failure(checks.problem)
    stopping.begin()
    course = Course()
    evaluated: Evaluation | None = None
    evaluated_at = saved = trainer.iteration if trainer.iteration else -1
    stop = 0
    begun = StepFile(Path(config.step_file) if config.step_file and grid.world.rank == 0 else None)
    with trace(grid.tensor, grid.data) as log:
        if goes_on and _lacks_evaluation(trainer, metrics):  # the run was ended in it
            with log.paused():
                evaluated, stop = _evaluate(task, metrics, agreement)
        for iteration in _iterations(trainer) if not stop else ():
            traced = config.log_communication_interval > 0 and iteration % config.log_communication_interval == 0
            with contextlib.nullcontext() if traced else log.paused(), checks.watching():
                begun.begin(iteration)
                began = time.perf_counter()
                course.step = step = trainer.step()
                course.seconds.append(time.perf_counter() - began)
            if traced:
                course.traced.append(course.seconds[-1])
                log.settle()
            with log.paused():
                checked = checks.after(step, course.seconds[-1])
            speed = batch_tokens / course.seconds[-1]
            metrics.progress(step.loss, speed)
            if iteration % config.log_interval == 0 or iteration == config.train_iters:
                metrics.log(
                    {"iteration": iteration, **step.losses, "grad_norm": None if step.skipped else step.norm,
                     "learning_rate": step.rate, "tokens_per_second": speed,
                     "iteration_ms": 1e3 * course.seconds[-1]}
                    | ({"loss_scale": trainer.loss_scale, "skipped": trainer.skipped} if config.fp16 else {})
                    | checked
                )  # fmt: skip
            with log.paused():
                stop = agreement.exchange()["stop"]
                if config.save_interval and iteration % config.save_interval == 0:
                    run_state.save(trainer)
                    saved = iteration
                if not stop and iteration % config.eval_interval == 0:
                    (evaluated, stop), evaluated_at = _evaluate(task, metrics, agreement), iteration
            if stop:
                break
    begun.close()
    last = trainer.iteration >= config.train_iters
    if folder is not None and saved != trainer.iteration:  # before the evaluation, which may take long
        run_state.save(trainer)
    if stop and last and evaluated_at != trainer.iteration:  # the steps are done, and the evaluation has not begun
        metrics.say(f"{stopping.text(stop)} came in the last step: the run ends as usual")
        stopping.forget()
        stop = 0
    if not stop and (evaluated_at != trainer.iteration or evaluated is None):
        evaluated, stop = _evaluate(task, metrics, agreement)
    if stop:
        if grid.world.rank == 0:
            metrics.close()
            print(_stopped(trainer, stopping.text(stop), folder), flush=True)
        return TEMPORARY
    report(task, metrics, folder, course, evaluated, communication_rows(log.totals()))
    return 0


def _iterations(trainer: Trainer) -> Iterator[int]:
    """The numbers, from 1, of the steps to come; each must be done before the next is asked for."""
    while trainer.iteration < trainer.config.train_iters:
        yield trainer.iteration + 1
        if trainer.config.exit_interval and trainer.iteration % trainer.config.exit_interval == 0:
            return


def _lacks_evaluation(trainer: Trainer, metrics: Metrics) -> bool:
    """Whether the metrics lack the evaluation of the trainer's iteration, after which steps follow. Collective."""
    config, iteration = trainer.config, trainer.iteration
    if iteration >= config.train_iters or iteration == 0 or iteration % config.eval_interval:
        return False
    return bool(on_rank_zero(trainer.grid.world, lambda: not metrics.has(iteration, "validation_loss")))


def _evaluate(task: TrainingTask, metrics: Metrics, agreement: StepAgreement) -> tuple[Evaluation | None, int]:
    """Each term's mean on the held-out samples, logged once; None if there is no evaluation or the run stops in it.

    The second value says why it stops, or 0.
    """

    def look() -> None:
        if stop := agreement.exchange()["stop"]:
            raise _EvaluationLeft(stop)

    trainer = task.trainer
    if not task.held_out:
        return None, 0
    trainer.optimizer.wait_for_parameters()
    try:
        found = evaluate_sources(trainer.model, trainer.objective, task.held_out, trainer.grid.data, look)
    except _EvaluationLeft as left:
        return None, left.args[0]
    loss, iteration = total(found.means), trainer.iteration
    terms = {f"validation_{name}": mean.loss for name, mean in found.means.items()} if len(found.means) > 1 else {}
    if len(found.by_source) > 1:
        terms |= {f"validation_loss/{name}": total(means) for name, means in found.by_source.items()}
    if not metrics.has(iteration, "validation_loss"):
        metrics.log({"iteration": iteration, "validation_loss": loss} | terms)
    metrics.say(f"iteration {iteration}: held-out loss {loss:.4f} {trainer.objective.unit}")
    return found, 0


def _stopped(trainer: Trainer, reason: str, folder: Path | None) -> str:
    """The line that says that the run stopped early."""
    config, iteration = trainer.config, trainer.iteration
    left = "the evaluation and the report are left" if iteration >= config.train_iters else ""
    at = f"stopped by {reason} after step {iteration} of {config.train_iters}" + (f" ({left})" if left else "")
    if folder is None:
        return f"{at}; nothing is saved, because there is no --save (exit status {TEMPORARY})"
    return f"{at}; the checkpoint is saved, go on with --load {folder} (exit status {TEMPORARY})"
