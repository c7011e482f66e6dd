"""A run, from its first step to its report: train, evaluate, save."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commengine import Communicator, UsageError, trace
from commengine.rank_zero import on_every_rank, on_rank_zero
from trainers.checkpoints import run_folder
from trainers.config import TrainConfig
from trainers.data.corpus import open_corpus
from trainers.training.compiler import require_compiler
from trainers.training.trainer import GPTTrainer, Step

from .generation import generate
from .metrics import Metrics
from .report import Report, communication_rows

PROMPT_TOKENS = 16


def train(config: TrainConfig, world: Communicator) -> Report | None:
    """Train until ``--train-iters`` (or ``--exit-interval``), evaluate, save, report. Collective.

    Where the checkpoint is there already: say so, leave all files as they are, and return None.
    """
    on_rank_zero(world, lambda: run_folder.require_free(config))
    if config.compile:
        on_every_rank(world, require_compiler)
    trainer = GPTTrainer(config, world, on_every_rank(world, lambda: open_corpus(config)))
    resumed = trainer.resume()
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
        on_rank_zero(world, lambda: _writable_folder("--save", folder))
    if config.tensorboard_dir:
        on_rank_zero(world, lambda: _writable_folder("--tensorboard-dir", Path(config.tensorboard_dir or "")))
    on_rank_zero(world, lambda: run_folder.clear(config))  # last: whatever can be refused was
    board = Path(config.tensorboard_dir) if config.tensorboard_dir else (folder / "tensorboard" if folder else None)
    metrics = Metrics(folder, trainer.iteration, config.train_iters, tensorboard=board, active=first)
    if config.load is not None:
        where = f"iteration {trainer.iteration} of" if resumed else "a new run: no checkpoint in"
        metrics.say(f"starting from {where} {config.load}")
    try:
        report = _train(trainer, metrics, folder)
    finally:
        metrics.close()
    trainer.close()  # not after an exception: it is collective, and the other ranks may be elsewhere
    return report


def _train(trainer: GPTTrainer, metrics: Metrics, folder: Path | None) -> Report:
    config, grid = trainer.config, trainer.grid
    batch_tokens = trainer.batches.size * config.seq_length
    step_times: list[float] = []
    step: Step | None = None
    evaluated: tuple[float, int] | None = None
    saved = evaluated_at = trainer.iteration if trainer.iteration else -1
    with trace(grid.tensor, grid.data) as log:
        for iteration in _iterations(trainer):
            began = time.perf_counter()
            step = trainer.step()
            step_times.append(time.perf_counter() - began)
            log.settle()
            speed = batch_tokens / step_times[-1]
            metrics.progress(step.loss, speed)
            if iteration % config.log_interval == 0 or iteration == config.train_iters:
                metrics.log(
                    {"iteration": iteration, "lm_loss": step.loss, "grad_norm": None if step.skipped else step.norm,
                     "learning_rate": step.rate, "tokens_per_second": speed, "iteration_ms": 1e3 * step_times[-1]}
                    | ({"loss_scale": trainer.loss_scale, "skipped": trainer.skipped} if config.fp16 else {})
                )  # fmt: skip
            with log.paused():
                if iteration % config.eval_interval == 0:
                    evaluated, evaluated_at = _evaluate(trainer, metrics), iteration
                if config.save_interval and iteration % config.save_interval == 0:
                    trainer.save()
                    saved = iteration
    if evaluated_at != trainer.iteration or evaluated is None:
        evaluated = _evaluate(trainer, metrics)
    if folder is not None and saved != trainer.iteration:
        trainer.save()
    return _report(trainer, metrics, folder, step, evaluated, step_times, communication_rows(log.totals()))


def _iterations(trainer: GPTTrainer) -> Iterator[int]:
    """The numbers, from 1, of the steps to come; each must be done before the next is asked for."""
    while trainer.iteration < trainer.config.train_iters:
        yield trainer.iteration + 1
        if trainer.config.exit_interval and trainer.iteration % trainer.config.exit_interval == 0:
            return


def _evaluate(trainer: GPTTrainer, metrics: Metrics) -> tuple[float, int] | None:
    result = trainer.evaluate()
    if result is not None:
        metrics.log({"iteration": trainer.iteration, "validation_loss": result[0]})
        metrics.say(f"iteration {trainer.iteration}: held-out loss {result[0]:.4f} nats/token")
    return result


def _report(
    trainer: GPTTrainer, metrics: Metrics, folder: Path | None, step: Step | None,
    evaluated: tuple[float, int] | None, step_times: list[float], communication: list[dict[str, Any]],
) -> Report:  # fmt: skip
    """The report, printed and written by rank 0."""
    config, corpus = trainer.config, trainer.corpus
    batch_tokens = trainer.batches.size * config.seq_length
    source = corpus.training if corpus.held_out is None else corpus.held_out
    prompt = [int(token) for token in source[0][: min(PROMPT_TOKENS, config.seq_length)]]
    trainer.optimizer.wait_for_parameters()
    sample = generate(trainer.model, prompt, config.sample_tokens, seed=config.seed)
    unigram = None
    if evaluated is not None:
        vocab_size, samples = trainer.model.config.vocab_size, evaluated[1] // config.seq_length
        unigram = on_rank_zero(trainer.grid.world, lambda: corpus.unigram_entropy(vocab_size, samples))
    report = Report(
        iteration=trainer.iteration,
        parameters=trainer.parameters(),
        tensor_model_parallel_size=trainer.grid.tensor.size,
        data_parallel_size=trainer.grid.data.size,
        train_loss=None if step is None else step.loss,
        validation_loss=None if evaluated is None else evaluated[0],
        unigram_entropy=unigram,
        validation_tokens=0 if evaluated is None else evaluated[1],
        tokens_per_second=batch_tokens / statistics.median(step_times) if step_times else 0.0,
        sample_prompt=corpus.decode(prompt),
        sample=corpus.decode(sample),
        communication=communication,
        step_seconds=sum(step_times),
        loss_scale=trainer.loss_scale if config.fp16 else None,
        skipped_steps=trainer.skipped,
    )
    if trainer.grid.world.rank == 0:
        metrics.close()
        print("\n" + report.text(), flush=True)
        if folder is not None:
            report.save(folder, metrics.rows)
            print(f"written to {folder}: report.json, report.txt, loss.png, metrics.jsonl, checkpoints", flush=True)
    return report


def _writable_folder(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {folder}: {error.strerror}; give a folder that can be made") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {folder}: cannot be written to")
