"""GPTTrainer: what takes part in a training step, and the step."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from commengine import Communicator, ProcessGrid, UsageError
from commengine.rank_zero import on_rank_zero
from tplayers import GPT, Randomness, initialize, placements
from trainers.checkpoints import checkpoint, run_folder
from trainers.config import TrainConfig
from trainers.data.batches import GlobalBatches, Microbatch
from trainers.data.corpus import Corpus
from trainers.data.samples import EpochPermutation
from trainers.run.evaluation import evaluate

from .clipping import clip, gradient_norm
from .optimizer import Optimizer
from .precision import LossScaler, on_any_rank, parameter_dtype
from .reduction import GradientBuckets
from .schedule import learning_rate


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


def _loss_scaler(config: TrainConfig) -> LossScaler:
    if config.loss_scale is not None:
        return LossScaler(config.loss_scale, window=None)
    return LossScaler(config.initial_loss_scale, config.loss_scale_window, config.hysteresis, config.min_loss_scale)
