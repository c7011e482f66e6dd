"""The training loop: one GPT over a tensor x data grid."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from commengine import Communicator, ProcessGrid, UsageError, trace
from tplayers import GPT, Randomness, initialize, placements

from . import checkpoint, run_folder
from .batches import GlobalBatches, Microbatch
from .compiler import require_compiler
from .config import TrainConfig
from .corpus import Corpus, open_corpus
from .data.samples import EpochPermutation
from .evaluation import evaluate
from .generation import generate
from .gradients import GradientBuckets
from .metrics import Metrics
from .norm import clip, gradient_norm
from .optimizer import Optimizer
from .precision import LossScaler, on_any_rank, parameter_dtype
from .rank_zero import on_every_rank, on_rank_zero
from .report import Report, communication_rows
from .schedule import learning_rate

PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Step:
    """What one step came to.

    loss: nats per token over the global batch. norm: of the gradient before clipping, neither of them scaled.
    skipped: the fp16 gradient overflowed, and nothing was updated.
    """

    loss: float
    norm: float
    rate: float
    skipped: bool = False


class GPTTrainer:
    """Everything that takes part in a step, as one object. Collective over ``world``, as are all its methods.

    config: valid for ``world`` and with its vocabulary known (`config.validate`, `corpus.with_vocabulary`).
    """

    def __init__(self, config: TrainConfig, world: Communicator, corpus: Corpus) -> None:
        self.config, self.corpus = config, corpus
        self.grid = ProcessGrid(world, tensor=config.tensor_model_parallel_size)
        dtype = parameter_dtype(bf16=config.bf16, fp16=config.fp16)
        tensor = self.grid.tensor
        stream = None
        if self._overlapped(config.async_tensor_model_parallel_allreduce) and tensor.size > 1:
            stream = tensor.new_stream()
        self.model = GPT(config.model(), tensor, dtype=dtype, overlap_stream=stream)
        initialize(self.model, config.seed)
        self.model.to(tensor.device)
        # Training steps alone: their shapes never change. The parameters are the model's own.
        self.forward = torch.compile(self.model, fullgraph=True, dynamic=False) if config.compile else self.model
        self.gradients = GradientBuckets(
            self.model, self.grid.data, tensor=self.grid.tensor, overlap=self._overlapped(config.overlap_grad_reduce),
            bucket_size=config.ddp_bucket_size, shard=config.use_distributed_optimizer,
            reduce_in_fp32=config.grad_reduce_in_fp32,
        )  # fmt: skip
        self.optimizer = Optimizer(
            self.gradients, weight_decay=config.weight_decay, betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
        )  # fmt: skip
        self.scaler = _loss_scaler(config) if config.fp16 else None
        size = config.global_batch_size or config.micro_batch_size * self.grid.data.size
        self.batches = self._batches(corpus.training, size, EpochPermutation(len(corpus.training), config.seed))
        self.held_out = None if corpus.held_out is None else self._batches(corpus.held_out, size, None)
        self.iteration = 0

    def _overlapped(self, asked: bool | None) -> bool:
        """Whether communication is to be hidden, where that is left open: host ranks fill the cores as it is."""
        return self.grid.world.device.type != "cpu" if asked is None else asked

    def _batches(self, samples: Any, size: int, order: EpochPermutation | None) -> GlobalBatches:
        return GlobalBatches(samples, order, size=size, micro=self.config.micro_batch_size, data=self.grid.data)

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before a backward."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def skipped(self) -> int:
        """Steps of the whole run that updated nothing."""
        return self.iteration - self.optimizer.updates

    def step(self) -> Step:
        """Forward, backward, reduce, clip, update: iteration + 1. A skipped step changes the loss scale alone."""
        config, data = self.config, self.grid.data
        microbatches = list(self.batches(self.iteration))
        tokens = self._counted(microbatches)
        self.optimizer.wait_for_parameters()
        self.gradients.zero()
        loss = torch.zeros(1, dtype=torch.float64)
        for batch in microbatches[:-1]:
            loss += self._backward(batch, tokens)
        with self.gradients.last_microbatch():
            loss += self._backward(microbatches[-1], tokens)
        self.gradients.finish()
        data.all_reduce(loss)
        shards = data if self.gradients.shard else None
        norm = gradient_norm(self.gradients.segments, self.grid.tensor, shards) / self.loss_scale
        rate = self._rate(self.optimizer.updates)
        skipped = self._overflowed(norm, loss.item())
        if not skipped:
            clip(self.gradients.segments, norm, config.clip_grad, scale=self.loss_scale)
            self.optimizer.step(rate)
        self._rescale(overflow=skipped)
        self.iteration += 1
        return Step(loss.item(), norm, rate, skipped)

    def _counted(self, microbatches: list[Microbatch]) -> int:
        """The labels that the whole global batch counts; collective over the data group.

        Losses are divided by it: that is no mean of means, and a rank may have none.
        """
        outside = not all(batch.fits(self.model.config.vocab_size) for batch in microbatches)
        counts = torch.tensor([sum(batch.counted for batch in microbatches), outside])
        self.grid.data.all_reduce(counts)
        if counts[1]:
            raise UsageError(
                f"step {self.iteration + 1}: a token lies outside the vocabulary of {self.config.vocab_size}: was "
                f"--data-path {self.config.data_path} made with another tokenizer, or is --vocab-size too small?"
            )
        return int(counts[0])

    def _overflowed(self, norm: float, loss: float) -> bool:
        """Whether an fp16 gradient is not finite on any rank of the world. Of other precisions that is a UsageError."""
        finite = math.isfinite(norm)
        if self.scaler is not None:
            # Agreed: a replicated parameter's gradient may overflow on one rank of a tensor group alone.
            return on_any_rank(not finite, self.grid.tensor, self.grid.data)
        if not finite:
            raise UsageError(  # the norm is the same on every rank
                f"step {self.iteration + 1}: the loss is {loss}, the gradient's norm {norm}: the run has "
                "diverged; the last checkpoint is as it was (a lower --lr, a longer --lr-warmup-iters or --clip-grad "
                "may help)"
            )
        return False

    def _rescale(self, *, overflow: bool) -> None:
        try:
            self.scaler = None if self.scaler is None else self.scaler.after(overflow=overflow)
        except UsageError as error:  # the scaler's state is the same on every rank
            raise UsageError(f"step {self.iteration + 1}: {error}") from error

    def _backward(self, batch: Microbatch, tokens: int) -> float:
        device = self.grid.world.device
        randomness = Randomness(self.config.seed, self.iteration, batch.numbers, device=device)
        batch = batch.to(device)
        loss = self.forward(batch.tokens, batch.labels, randomness).sum() / max(tokens, 1)
        (loss if self.scaler is None else loss * self.scaler.scale).backward()
        return float(loss.item())

    def _rate(self, iteration: int) -> float:
        config = self.config
        return learning_rate(
            iteration, lr=config.lr, min_lr=config.min_lr, style=config.lr_decay_style,
            warmup_iters=config.lr_warmup_iters, decay_iters=config.lr_decay_iters or config.train_iters,
        )  # fmt: skip

    def evaluate(self) -> tuple[float, int] | None:
        """(Held-out loss in nats per token, tokens), or None where evaluation is off."""
        if self.config.eval_iters == 0 or self.held_out is None:
            return None
        self.optimizer.wait_for_parameters()
        return evaluate(self.model, self.held_out, self.grid.data, iterations=self.config.eval_iters)

    def save(self) -> None:
        """Write a checkpoint of this iteration into ``--save``."""
        assert self.config.save is not None
        folder, settings = Path(self.config.save), self._settings()
        scaler = None if self.scaler is None else self.scaler.to_json()
        progress = checkpoint.Progress(self.iteration, self.optimizer.updates, scaler, self.optimizer.masters)
        checkpoint.save(folder, progress, self.model, self.optimizer, settings, self.grid)

    def resume(self) -> bool:
        """Load the checkpoint that ``--load`` names; False where there is none (`run_folder.checkpoint_to_load`)."""
        if self.config.load is None:
            return False
        settings = self._settings()

        def find() -> list[Any]:
            found = run_folder.checkpoint_to_load(self.config)
            return [None, None] if found is None else [str(found), asdict(checkpoint.read_state(found, settings))]

        found, state = on_rank_zero(self.grid.world, find)
        if found is None:
            return False
        progress = checkpoint.Progress(**state)
        checkpoint.load(Path(found), progress, self.model, self.optimizer, self.grid)
        self.iteration = progress.iteration
        if self.scaler is not None and progress.loss_scaler is not None:
            self.scaler = self.scaler.from_json(progress.loss_scaler)
        return True

    def _settings(self) -> dict[str, Any]:
        """The settings, and what follows from the number of ranks where it was left open."""
        return self.config.to_json() | {"global_batch_size": self.batches.size}

    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(math.prod(placement.shape) for placement in placements(self.model).values())

    def close(self) -> None:
        """Free hooks and groups."""
        self.gradients.remove()
        self.grid.close()


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


def _loss_scaler(config: TrainConfig) -> LossScaler:
    if config.loss_scale is not None:
        return LossScaler(config.loss_scale, window=None)
    return LossScaler(config.initial_loss_scale, config.loss_scale_window, config.hysteresis, config.min_loss_scale)


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
