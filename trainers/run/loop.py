"""A run from its first step to its report: train, save, evaluate; and stop early where that is asked for."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from commengine import Communicator, Trace, UsageError, trace
from commengine.options.declared import make_writable
from commengine.rank_zero import on_every_rank, on_rank_zero
from trainers.checkpoints import folder_lock, history, pointer, run_folder, run_state
from trainers.checks.digests import digests, layout
from trainers.checks.in_run import InRunChecks
from trainers.settings import derived
from trainers.settings.commands import TrainSettings
from trainers.training.trainer import Trainer, require_compiler

from .evaluation import Evaluation, evaluate_sources, total
from .experts import ExpertWatch
from .exports import Exports, require_possible
from .metrics import AT_STOP, Metrics, StepFile
from .report import Course, communication_rows, kept_iterations, report
from .step_agreement import agree
from .stopping import TEMPORARY, StopRequests
from .task import TrainingTask

Config = TypeVar("Config", bound=TrainSettings)


class _EvaluationLeft(Exception):
    """Ends an evaluation on all ranks, because the run stops."""


def train(
    config: Config, world: Communicator, new_task: Callable[[Config, Communicator], TrainingTask],
    stopping: StopRequests, *, go_on: str | None = None, remarks: Sequence[str] = (),
) -> int:  # fmt: skip
    """Train until ``--train-iters`` (or ``--exit-interval``), save, evaluate, report. Collective over ``world``.

    config: valid and complete (`trainers.run.startup.read_config`). new_task: called with these arguments, on every
    rank, to make the task. stopping: may stop the run after any step and between the batches of an evaluation; it then
    has a checkpoint, if there is ``--save``. go_on: the options that go on with a run that stopped, for people; None
    for ``--load`` with the folder of ``--save``. remarks: what rank 0 says at the start.

    Returns the exit status: 0, or `TEMPORARY` if the run stopped before its last step or before that step's report.

    If the checkpoint is at ``--train-iters`` already, the report is written if it is missing; otherwise the run says
    that there is nothing to train and leaves its files as they are. Raises UsageError, on all ranks, where an option or
    a file does not fit, or a file cannot be written.
    """
    on_rank_zero(world, lambda: run_folder.require_free(config))
    if config.compile:
        on_every_rank(world, require_compiler)
    folder = Path(config.save) if config.save else None
    with contextlib.ExitStack() as held:
        lost: Callable[[], str | None] = lambda: None  # noqa: E731
        if folder is not None:
            on_rank_zero(world, lambda: make_writable("--save", folder))
            lost = held.enter_context(folder_lock.hold(world, folder)).problem
            on_rank_zero(world, lambda: run_folder.require_free(config))  # another run may just have ended
        task = new_task(config, world)
        trainer = task.trainer
        beginning = run_state.begin(trainer)
        resumed, goes_on = run_state.resume(trainer, beginning), beginning.goes_on
        settle = lambda: _settle(config, beginning, trainer.iteration, lost)  # noqa: E731
        if _is_done(trainer, folder, goes_on=goes_on):
            changed = on_rank_zero(world, settle) if goes_on and trainer.iteration == config.train_iters else None
            if world.rank == 0:
                print(
                    f"nothing to train: the checkpoint in {config.load} is at iteration {trainer.iteration}, "
                    f"--train-iters is {config.train_iters}; {changed or 'files are left as they are'}",
                    flush=True,
                )
            trainer.close()
            return 0
        if folder is not None:
            on_rank_zero(world, lambda: require_possible(task))  # before anything is written
        if config.tensorboard_dir:
            on_rank_zero(world, lambda: make_writable("--tensorboard-dir", Path(config.tensorboard_dir or "")))
        changed = on_rank_zero(world, settle)  # last, when nothing can be refused any more
        board = Path(config.tensorboard_dir) if config.tensorboard_dir else (folder / "tensorboard" if folder else None)
        metrics = on_every_rank(
            world,
            lambda: Metrics(folder, trainer.iteration, config.train_iters, tensorboard=board, active=world.rank == 0),
        )
        if config.tensorboard_dir and importlib.util.find_spec("tensorboard") is None:
            remarks = [*remarks, "--tensorboard-dir: nothing is written there, because TensorBoard is not installed: "
                                 "pip install tensorboard"]  # fmt: skip
        for line in remarks:
            metrics.say(line)
        if config.load is not None:
            for line in resumed or [run_folder.new_run(config.load)]:
                metrics.say(line)
        if changed:
            metrics.say(changed)
        if stopping.limit is not None:
            metrics.say(stopping.limit)
        saver = run_state.CheckpointSaver(trainer, lost)
        try:
            status = _Run(task, metrics, saver, lost, stopping, goes_on=goes_on, go_on=go_on).run()
        except UsageError:  # on all ranks; what is being written in the background is of a step before the error
            with contextlib.suppress(UsageError):
                saver.finish()
            raise
        finally:
            metrics.close()
        trainer.close()  # not after an exception: it is collective, and the other ranks may be in another call
    return status


def _settle(
    config: TrainSettings, beginning: history.Beginning, iteration: int, lost: Callable[[], str | None]
) -> str | None:
    """Remove from ``--save`` what this run replaces, and what killed ones left: the first rows may need its room."""
    if (problem := lost()) is not None:
        raise UsageError(problem)
    return history.settle(config, beginning, iteration)


def _is_done(trainer: Trainer, folder: Path | None, *, goes_on: bool) -> bool:
    """Whether the run has done its steps, and has its report if that belongs to this run. Collective."""
    iteration, last = trainer.iteration, trainer.config.train_iters
    if iteration == last and folder is not None and goes_on:
        return bool(on_rank_zero(trainer.grid.world, lambda: run_folder.reported(folder) == iteration))
    return iteration >= last


class _Run:
    """The steps of a run and what follows them. All methods are collective over the trainer's world.

    goes_on: the run continues in its own folder. go_on: as for `train`, which makes the other arguments.
    """

    def __init__(
        self, task: TrainingTask, metrics: Metrics, saver: run_state.CheckpointSaver,
        lost: Callable[[], str | None], stopping: StopRequests, *, goes_on: bool, go_on: str | None,
    ) -> None:  # fmt: skip
        self.task, self.trainer, self.config = task, task.trainer, task.trainer.config
        self.metrics, self.saver, self.lost, self.stopping = metrics, saver, lost, stopping
        self.folder = Path(self.config.save) if self.config.save else None
        self.checks = InRunChecks(self.trainer, self.folder, metrics.say)
        self.course = Course()
        self.experts = ExpertWatch(metrics.say)
        self.goes_on, self.go_on = goes_on, go_on
        asked, device = self.config.log_communication_interval, self.trainer.grid.world.device
        self.traced_interval = derived.traced_interval(asked, device, self.config.train_iters)
        self.evaluated: Evaluation | None = None
        self.evaluated_at = self.saved = self.trainer.iteration if self.trainer.iteration else -1
        self.exports = Exports(task, metrics, saver)
        self.stop = 0  # why the run stops early, the same on all ranks (`StopRequests.reason`)

    def run(self) -> int:
        """All of it: the exit status."""
        self.stopping.begin()
        grid = self.trainer.grid
        first = grid.world.rank == 0
        with trace(*grid.groups) as log:
            begun = StepFile(Path(self.config.step_file) if self.config.step_file and first else None)
            if self.trainer.iteration:  # the evaluation and the report of this step may be left, and may take long
                begun.begin(self.trainer.iteration)
            if self.goes_on and self.trainer.iteration:
                with log.paused():
                    self._restore_best()
                    self.exports.go_on()
                    if self._lacks_evaluation():  # the run was ended in it
                        self._evaluate()
            while not self.stop and self.trainer.iteration < self.config.train_iters:
                iteration = self.trainer.iteration + 1
                begun.begin(iteration)
                self._step(iteration, log)
                with log.paused():
                    stops = self._stops()
                    if self.config.save_interval and iteration % self.config.save_interval == 0:
                        self._save()
                    if not stops and iteration % self.config.eval_interval == 0:
                        self._evaluate()
                if self.config.exit_interval and iteration % self.config.exit_interval == 0:
                    break
            begun.close()
        return self._end(communication_rows(log.totals()))

    def _step(self, iteration: int, log: Trace) -> None:
        """One step and its row of the metrics."""
        config, trainer, course = self.config, self.trainer, self.course
        traced = self.traced_interval > 0 and iteration % self.traced_interval == 0
        with contextlib.nullcontext() if traced else log.paused(), self.checks.watching():
            began = time.perf_counter()
            course.step = step = trainer.step()
            seconds = time.perf_counter() - began
        course.seconds.append(seconds)
        if traced:
            course.traced.append(seconds)
            log.settle()
        with log.paused():
            checked = self.checks.after(step, seconds)
            found = digests(trainer, step) | layout(trainer) if derived.writes_digests(config) else {}
        speed = trainer.batches.size * self.task.tokens_per_sample / seconds
        self.metrics.progress(step.loss, speed)
        losses = {**step.losses, **step.router_losses}
        row = {"iteration": iteration, **losses, "grad_norm": None if step.skipped else step.norm}
        if iteration % config.log_interval == 0 or iteration == config.train_iters:
            with log.paused():
                tokens = trainer.take_expert_tokens()
            row |= {} if tokens is None else self.experts.row(iteration, tokens)
            row |= {"learning_rate": step.rate, "tokens_per_second": speed, "iteration_ms": 1e3 * seconds}
            row |= {"loss_scale": trainer.loss_scale, "skipped": trainer.skipped} if config.fp16 else {}
            self.metrics.log(row | checked | found)
        elif found:
            self.metrics.log(row | found)

    def _stops(self) -> bool:
        """Learn from the ranks' agreement whether the run stops, and how far the checkpoint in the background is."""
        problem = self.lost() or self.metrics.problem() or self.checks.problem()
        self.stop, writing = agree(self.trainer.grid.world, problem, self.stopping.reason(), self.saver.state())
        self.saver.settle(writing)
        return self.stop != 0

    def _save(self) -> None:
        self.saver.start()
        self.saved = self.trainer.iteration
        self.exports.after_save()

    def _lacks_evaluation(self) -> bool:
        """Whether the metrics lack the evaluation of the trainer's iteration, after which steps follow."""
        iteration = self.trainer.iteration
        if iteration >= self.config.train_iters or iteration == 0 or iteration % self.config.eval_interval:
            return False
        metrics = self.metrics
        return bool(on_rank_zero(self.trainer.grid.world, lambda: not metrics.has(iteration, "validation_loss")))

    def _evaluate(self) -> None:
        """Each term's mean on the held-out samples, logged once; nothing if there are none or the run stops in it."""

        def between() -> None:
            if self._stops():
                raise _EvaluationLeft

        trainer = self.trainer
        self.evaluated, self.evaluated_at = None, trainer.iteration
        if not self.task.held_out:
            return
        trainer.optimizer.wait_for_parameters()
        try:
            objective = self.task.evaluation_objective()
            found = evaluate_sources(
                trainer.model, objective, self.task.held_out, trainer.grid, between, trainer.schedule
            )
        except _EvaluationLeft:
            return
        measures = self.task.measures()
        kept = self._keep_best(measures)
        loss, iteration = total(found.means), trainer.iteration
        terms = {}
        if len(found.means) > 1:
            terms = {f"validation_{name}": mean.loss for name, mean in found.means.items()}
        if len(found.by_source) > 1:
            terms |= {f"validation_loss/{name}": total(means) for name, means in found.by_source.items()}
        terms |= {f"validation_{name}": value for name, value in measures.items()}
        if not self._is_due():
            terms[AT_STOP] = 1
        if not self.metrics.has(iteration, "validation_loss"):
            self.metrics.log({"iteration": iteration, "validation_loss": loss} | terms)
        self.metrics.say(f"iteration {iteration}: held-out loss {loss:.4f} {trainer.objective.unit}{kept}")
        self.evaluated = found

    def _is_due(self) -> bool:
        """Whether a run that is never stopped evaluates at this iteration, too."""
        iteration = self.trainer.iteration
        return iteration % self.config.eval_interval == 0 or iteration >= self.config.train_iters

    def _keep_best(self, measures: Mapping[str, float]) -> str:
        """Save and mark the checkpoint if the measure that the task is kept by is the largest so far: words for people.

        Before the row of this evaluation is written, so that a run that is killed in between evaluates again.
        """
        name, metrics, iteration = self.task.kept_by, self.metrics, self.trainer.iteration
        if name is None or name not in measures:
            return ""
        value = measures[name]
        if not self._is_due():  # otherwise the kept checkpoint would depend on where the run stopped
            return f", {name.replace('_', ' ')} {value:.4f} (at a stop, so it is not compared with the best)"

        def largest() -> bool:
            before = metrics.best(f"validation_{name}", iteration, kept_iterations(self.folder))
            return before is None or value > before[0]

        said = f", {name.replace('_', ' ')} {value:.4f}"
        if not on_rank_zero(self.trainer.grid.world, largest):
            return said
        if self.folder is not None:
            if self.saved != iteration:
                self._save()
            self.saver.finish()
            self.saver.point_to_best()
        return f"{said} (the best so far)"

    def _require_folder(self) -> None:
        """Raise UsageError if the run has lost its folder."""
        if (problem := self.lost()) is not None:
            raise UsageError(problem)

    def _restore_best(self) -> None:
        """Mark the best of the checkpoints that are there, if the run has gone back behind the one that was marked."""
        name, folder, metrics = self.task.kept_by, self.folder, self.metrics
        if name is None or folder is None:
            return

        def restore() -> None:
            if pointer.best(folder) is None:
                found = metrics.best(f"validation_{name}", among=kept_iterations(folder))
                if found is not None:
                    pointer.point_to(folder, pointer.name_of(found[1]), pointer.BEST)

        on_rank_zero(self.trainer.grid.world, restore)

    def _end(self, communication: list[dict[str, Any]]) -> int:
        """Save, evaluate and report after the last step, or only save if the run stops: the exit status."""
        trainer, stopping = self.trainer, self.stopping
        if self.folder is not None and self.saved != trainer.iteration:  # before the evaluation, which may take long
            self._save()
        begun = self.evaluated_at == trainer.iteration
        if self.stop and trainer.iteration >= self.config.train_iters and not begun:
            self.metrics.say(f"{stopping.text(self.stop)} came in the last step: the run ends as usual")
            stopping.forget()
            self.stop = 0
        if not self.stop and (not begun or self.evaluated is None):
            self._evaluate()
        self.saver.finish()
        if not self.stop:
            self.exports.at_end()
        if self.stop:
            # A line of its own at the bar.
            self.metrics.say(_stopped(trainer, stopping.text(self.stop), self.folder, self.go_on))
            return TEMPORARY
        on_rank_zero(trainer.grid.world, self._require_folder)
        report(self.task, self.metrics, self.folder, self.course, self.evaluated, communication, self.experts.tokens)
        if trainer.iteration < self.config.train_iters:
            reason = f"--exit-interval {self.config.exit_interval}"
            self.metrics.say(_stopped(trainer, reason, self.folder, self.go_on))
            return TEMPORARY
        return 0


def _stopped(trainer: Trainer, reason: str, folder: Path | None, go_on: str | None) -> str:
    """The line that says that the run stopped early. folder: of ``--save``. go_on: as for `train`."""
    config, iteration = trainer.config, trainer.iteration
    left = "the evaluation and the report are left" if iteration >= config.train_iters else ""
    at = f"stopped by {reason} after step {iteration} of {config.train_iters}" + (f" ({left})" if left else "")
    if folder is None:
        return f"{at}; nothing is saved, because there is no --save (exit status {TEMPORARY})"
    return f"{at}; the checkpoint is saved, go on with {go_on or f'--load {folder}'} (exit status {TEMPORARY})"
