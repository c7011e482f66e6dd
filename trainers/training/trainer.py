"""Trainer: everything that takes part in a training step, and the step."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from commengine import ProcessGrid, UsageError
from tplayers import Randomness, placements
from trainers.config import TrainConfig, bucket_size, overlapped

from .clipping import clip, exact_gradient_norm, gradient_norm
from .interfaces import BatchSource, Microbatch, Objective
from .optimizer import Optimizer
from .precision import LossScaler, on_any_rank
from .reduction import GradientBuckets
from .sample_tree import run_length, tree_of_samples
from .schedule import learning_rate


class Diverged(UsageError):
    """The loss or the gradient of a step is not finite. All ranks raise it, and ``Trainer.iteration`` stays."""


@dataclass(frozen=True)
class Step:
    """The result of one step, the same on every rank.

    losses: the mean of each of the objective's terms over the global batch, by name. norm: the gradient's norm before
    clipping. Neither contains the loss scale. rate: the learning rate. skipped: the fp16 gradient overflowed, and
    nothing was updated.
    """

    losses: Mapping[str, float]
    norm: float
    rate: float
    skipped: bool = False

    @property
    def loss(self) -> float:
        """The sum of ``losses``, which the step minimizes."""
        return sum(self.losses.values())


class Trainer:
    """A model in training: its gradients, optimizer, loss scaler and iteration. Collective over the grid's world.

    config: valid for the world's size (`TrainConfig.validate`).
    grid: the tensor and data groups. The trainer closes it with `close`.
    model: its parameters have their initial values. They are in the dtype that ``config.bf16`` and ``config.fp16`` name
        (`precision.parameter_dtype`), and either placed by a layer of tplayers over ``grid.tensor``, or equal on all
        ranks. The trainer moves the model to the grid's device, and may make its parameters views of flat buffers.
    objective, batches: what is minimized, and over which samples; see `trainers.training.interfaces`.

    All methods are collective, with the same arguments on every rank.
    """

    def __init__(
        self, config: TrainConfig, grid: ProcessGrid, model: nn.Module, objective: Objective[Any],
        batches: BatchSource[Any],
    ) -> None:  # fmt: skip
        grid.require_axes("Trainer", "tensor", "data")
        self.config, self.grid, self.objective, self.batches = config, grid, objective, batches
        self.model = model.to(grid.world.device)
        # The compiled form is for training steps only, because their shapes never change. It shares the parameters.
        self.forward: Any = torch.compile(model, fullgraph=True, dynamic=False) if config.compile else model
        #: if the run has the same bits at every layout: the samples that are added one to the other (`SampleTree`)
        self.run = None if config.canonical_shards is None else run_length(batches.size)
        self.gradients = GradientBuckets(
            model, grid.data, tensor=grid.tensor, overlap=overlapped(config.overlap_grad_reduce, grid.world.device),
            bucket_size=bucket_size(config.ddp_bucket_size, grid.world.device, grid.data.size),
            shard=config.use_distributed_optimizer,
            reduce_in_fp32=config.grad_reduce_in_fp32 or self.run is not None, run=self.run,
        )  # fmt: skip
        self.optimizer = Optimizer(
            self.gradients, weight_decay=config.weight_decay, betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
        )  # fmt: skip
        self.scaler = _loss_scaler(config) if config.fp16 else None
        self.iteration = 0

    @property
    def loss_scale(self) -> float:
        """The factor of the loss before each backward: 1 without fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def skipped(self) -> int:
        """The number of steps, over the whole run, that updated nothing."""
        return self.iteration - self.optimizer.updates

    def step(self) -> Step:
        """Forward, backward, reduce, clip, update: iteration + 1. A skipped step changes only the loss scale.

        Raises UsageError, on all ranks, where a batch is not usable or the run has diverged.
        """
        config, data = self.config, self.grid.data
        microbatches = list(self.batches(self.iteration))
        counts = self._global_counts(microbatches)
        self.optimizer.wait_for_parameters()
        losses = self._forward_and_backward(microbatches, counts)
        data.all_reduce(losses)
        norm_of = gradient_norm if self.run is None else exact_gradient_norm
        shards = data if self.gradients.shard else None
        norm = norm_of(self.gradients.segments, self.grid.tensor, shards) / self.loss_scale
        rate = self._rate(self.optimizer.updates)
        step = Step(dict(zip(self.objective.names, losses.tolist(), strict=True)), norm, rate, self._overflowed(norm))
        if not step.skipped:
            self._require_finite(step)
            clip(self.gradients.segments, norm, config.clip_grad, scale=self.loss_scale)
            self.optimizer.step(rate)
        self._rescale(overflow=step.skipped)
        self.iteration += 1
        return step

    def _global_counts(self, microbatches: Sequence[Microbatch]) -> list[int]:
        """For each term the items that it counts in the whole global batch. Collective over the data group."""
        mine = [sum(counts) for counts in zip(*(batch.counts for batch in microbatches), strict=True)]
        unusable = not all(batch.usable for batch in microbatches)
        counts = torch.tensor([*mine, unusable], dtype=torch.int64, device="cpu")
        self.grid.data.all_reduce(counts)
        *of_terms, unusable = counts.tolist()
        if unusable:
            raise UsageError(f"step {self.iteration + 1}: {self.batches.unusable}")
        return of_terms

    def _forward_and_backward(self, microbatches: Sequence[Microbatch], counts: Sequence[int]) -> Tensor:
        """Fill the gradients, in the order of a schedule: here one microbatch after the other.

        Returns this replica's share of each term's mean over the global batch: float64 [terms], on the host.
        """
        self.gradients.zero()
        # On the device, and read once a step: reading a loss makes the host wait for the whole forward.
        shares = [self._backward(batch, counts) for batch in microbatches[:-1]]
        with self.gradients.last_microbatch():
            shares.append(self._backward(microbatches[-1], counts))
        self.gradients.finish()
        return tree_of_samples(shares, self.run or len(shares)).cpu()

    def _backward(self, batch: Microbatch, counts: Sequence[int]) -> Tensor:
        """Add the gradient of one microbatch. Returns its share of each term's mean: float64 [terms]."""
        device = self.grid.world.device
        randomness = Randomness(self.config.seed, self.iteration, batch.numbers, device=device)
        terms = self.objective(self.forward, batch.to(device), randomness)
        shares = [losses.sum() / max(count, 1) for losses, count in zip(terms, counts, strict=True)]
        loss = shares[0] if len(shares) == 1 else torch.stack(shares).sum()
        (loss if self.scaler is None else loss * self.scaler.scale).backward()  # type: ignore[no-untyped-call]
        return torch.stack([share.detach().double() for share in shares])

    def _overflowed(self, norm: float) -> bool:
        """Whether an fp16 gradient is not finite on any rank of the world. False in other precisions."""
        if self.scaler is None:
            return False
        # The ranks must agree: a replicated parameter's gradient may overflow on one rank of a tensor group only.
        return on_any_rank(not math.isfinite(norm), self.grid.tensor, self.grid.data)

    def _require_finite(self, step: Step) -> None:
        if not math.isfinite(step.norm):
            raise Diverged(  # on all ranks, because the norm is the same on all
                f"step {self.iteration + 1}: the loss is {step.loss}, the gradient's norm {step.norm}: the run has "
                "diverged; the last checkpoint is as it was (a lower --lr, a longer --lr-warmup-iters or --clip-grad "
                "may help)"
            )

    def _rescale(self, *, overflow: bool) -> None:
        try:
            self.scaler = None if self.scaler is None else self.scaler.after(overflow=overflow)
        except UsageError as error:  # on all ranks, because the scaler's state is the same on all
            raise UsageError(f"step {self.iteration + 1}: {error}") from error

    def _rate(self, iteration: int) -> float:
        config = self.config
        return learning_rate(
            iteration, lr=config.lr, min_lr=config.last_lr, style=config.lr_decay_style,
            warmup_iters=config.lr_warmup_iters, decay_iters=config.lr_decay_iters or config.train_iters,
        )  # fmt: skip

    def continue_from(self, iteration: int, loss_scaler: dict[str, Any] | None) -> None:
        """Go on as after ``iteration`` steps, with a saved state of the loss scaler (`LossScaler.to_json`).

        Parameters and the optimizer's state are loaded apart (`Optimizer.fill`).
        """
        self.iteration = iteration
        if self.scaler is not None and loss_scaler is not None:
            self.scaler = self.scaler.from_json(loss_scaler)

    def parameters(self) -> int:
        """The number of parameters of the whole model."""
        return sum(math.prod(placement.shape) for placement in placements(self.model).values())

    def close(self) -> None:
        """Free the hooks and the grid."""
        self.gradients.remove()
        self.grid.close()


def _loss_scaler(config: TrainConfig) -> LossScaler:
    if config.loss_scale is not None:
        return LossScaler(config.loss_scale, window=None)
    return LossScaler(config.initial_loss_scale, config.loss_scale_window, config.hysteresis, config.least_loss_scale)


def require_compiler() -> None:
    """Raise UsageError unless this rank's machine has the C++ compiler that torch.compile calls."""
    command = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(command) is None:
        raise UsageError(
            f"--compile: needs a C++ compiler, and there is no {command} on PATH; install one, name it in CXX, or "
            "train without --compile"
        )
