"""Trainer: everything that takes part in a training step, and the step."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from commengine import ProcessGrid, UsageError
from commengine.grid import AXES
from tplayers import ModelPart, Randomness, RouterLosses, StageInput, whole_placements
from tplayers.canonical.experts import twins_of
from trainers.pipeline.schedule import Schedule, activations_like
from trainers.settings import derived
from trainers.settings.commands import TrainSettings

from .clipping import clip, exact_gradient_norm, gradient_norm
from .holders import replicas_of
from .interfaces import BatchSource, Microbatch, Objective, require_same_settings
from .learning_rate import learning_rate
from .optimizer import Optimizer
from .precision import LossScaler, on_any_rank
from .reduction import GradientBuckets
from .routers import Routers
from .sample_tree import run_length, tree_of_samples
from .tied import tied_weight


class Diverged(UsageError):
    """The loss or the gradient of a step is not finite. All ranks raise it, and ``Trainer.iteration`` stays."""


@dataclass(frozen=True)
class Step:
    """The result of one step, the same on every rank.

    losses: the mean of each of the objective's terms over the global batch, by name. norm: the gradient's norm before
    clipping. Neither contains the loss scale. rate: the learning rate. skipped: the fp16 gradient overflowed, and
    nothing was updated. router_losses: of a model with experts (`tplayers.RouterLosses.names`), likewise.
    """

    losses: Mapping[str, float]
    norm: float
    rate: float
    skipped: bool = False
    router_losses: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The sum of ``losses``. The step minimizes it, with the losses of routers."""
        return sum(self.losses.values())


class Trainer:
    """A model in training: its gradients, optimizer, loss scaler and iteration. Collective over the grid's world.

    config: valid for the world's size (`TrainSettings.validate`).
    grid: the groups. The trainer closes it with `close`. In a context group all ranks have the same batches, and
        ``model`` has the group (`tplayers.ContextGroup`). With an expert group, ``model`` has it, too (`tplayers.MoE`).
    model: its parameters have their initial values. They are in the dtype that ``config.bf16`` and ``config.fp16`` name
        (`precision.parameter_dtype`), and either placed by a layer of tplayers over ``grid.tensor``, or equal on all
        ranks. In a pipeline it is this stage's part (`tplayers.ModelPart`), and the batches have ``tokens``. The
        trainer moves the model to the grid's device, and may make its parameters views of flat buffers.
    objective, batches: what is minimized, and over which samples; see `trainers.training.interfaces`.

    Raises UsageError, on all ranks, where ``config`` contradicts the model or the batches (`require_same_settings`).

    All methods are collective, with the same arguments on every rank.
    """

    def __init__(
        self, config: TrainSettings, grid: ProcessGrid, model: nn.Module, objective: Objective[Any],
        batches: BatchSource[Any],
    ) -> None:  # fmt: skip
        # Without these groups their ranks would each count all losses, or have gradients of nobody else's experts.
        for axis, group, said in (("context", "context", "a context"), ("expert", "expert_group", "an expert")):
            if getattr(model, group, None) is None:
                others = (one for one in (*AXES, "expert") if one != axis)
                grid.require_axes(f"Trainer of a model without {said} group", *others)
        require_same_settings(config, model, batches.size, grid)
        self.config, self.grid, self.objective, self.batches = config, grid, objective, batches
        self.model = model.to(grid.world.device)
        self.replicas = replicas_of(model, grid)
        self.routers = Routers.of(model)
        # The compiled form is for training steps only, because their shapes never change. It shares the parameters.
        self.forward: Any = torch.compile(model, fullgraph=True, dynamic=False) if config.compile else model
        #: if the run has the same bits at every layout: the samples that are added one to the other (`SampleTree`)
        self.run = None if derived.canonical_shards(config) is None else run_length(batches.size)
        part: ModelPart | None = getattr(model, "part", None)
        self.schedule = Schedule(grid.pipeline, part, threaded=derived.threaded_messages(config))
        self.tied = tied_weight(model, grid.pipeline, apart=self.run is not None)
        twins = twins_of(model)
        self.gradients = GradientBuckets(
            model, self.replicas, experts=grid.expert_replicas, tensor=grid.tensor,
            overlap=derived.overlapped(config.overlap_grad_reduce, grid.world.device),
            bucket_size=derived.bucket_size(config.ddp_bucket_size, grid.world.device, self.replicas.size),
            shard=config.use_distributed_optimizer,
            reduce_in_fp32=config.grad_reduce_in_fp32 or self.run is not None, run=self.run,
            chunk_of=(lambda _: 0) if part is None else part.chunk_of, tied=self.tied, twins=twins,
        )  # fmt: skip
        self.optimizer = Optimizer(
            self.gradients, weight_decay=config.weight_decay, betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
        )  # fmt: skip
        if self.tied is not None:
            self.tied.follow(self.gradients.named[self.tied.name])
        for name, of_parameter in twins.items():
            for twin in of_parameter:  # the optimizer may have moved the parameter
                twin.data = self.gradients.named[name].data
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
        config, replicas = self.config, self.replicas
        microbatches = list(self.batches(self.iteration))
        counts = self._global_counts(microbatches)
        self.optimizer.wait_for_parameters()
        losses = self._forward_and_backward(microbatches, counts)
        for group in (replicas, self.grid.pipeline):
            group.all_reduce(losses)
        norm_of = gradient_norm if self.run is None else exact_gradient_norm
        shares = [self.grid.pipeline, *([replicas] if self.gradients.shard else [])]
        experts = None if self.gradients.shard else self.grid.expert
        norm = norm_of(self.gradients.segments, self.grid.tensor, shares, experts) / self.loss_scale
        rate = self._rate(self.optimizer.updates)
        of_terms = dict(zip(self.objective.names, losses.tolist(), strict=False))
        of_routers = dict(zip(RouterLosses.names, losses[len(of_terms) :].tolist(), strict=False))
        step = Step(of_terms, norm, rate, self._overflowed(norm), of_routers)
        if not step.skipped:
            self._require_finite(step)
            clip(self.gradients.segments, norm, config.clip_grad, scale=self.loss_scale)
            self.optimizer.step(rate)
        self._rescale(overflow=step.skipped)
        self.iteration += 1
        return step

    def _global_counts(self, microbatches: Sequence[Microbatch]) -> list[int]:
        """For each term the items that it counts in the whole global batch. Collective over the data group.

        The ranks of a context group have the same batches, and each counts all of them.
        """
        mine = [sum(counts) for counts in zip(*(batch.counts for batch in microbatches), strict=True)]
        unusable = not all(batch.usable for batch in microbatches)
        counts = torch.tensor([*mine, unusable], dtype=torch.int64, device="cpu")
        self.grid.data.all_reduce(counts)
        *of_terms, unusable = counts.tolist()
        if unusable:
            raise UsageError(f"step {self.iteration + 1}: {self.batches.unusable}")
        return of_terms

    def _forward_and_backward(self, microbatches: Sequence[Microbatch], counts: Sequence[int]) -> Tensor:
        """Fill the gradients, in the order of the schedule.

        Returns this rank's share of each term's mean over the global batch: float64 [terms], on the host. It is 0 on a
        stage without the output layer. The losses of routers follow the terms.
        """
        self.gradients.zero()
        shares: list[Tensor] = []  # on the device, and read once a step: reading one waits for the whole forward
        routers, samples = self.routers, self.batches.size

        def forward(number: int, at: StageInput | None) -> Tensor:
            batch = microbatches[number]
            device = self.grid.world.device
            randomness = Randomness(self.config.seed, self.iteration, batch.numbers, device=device)

            def loss(model: Any) -> Tensor:
                terms = self.objective(model, batch.to(device), randomness)
                means = [losses.sum() / max(count, 1) for losses, count in zip(terms, counts, strict=True)]
                shares.append(torch.stack([mean.detach().double() for mean in means]))
                total = means[0] if len(means) == 1 else torch.stack(means).sum()
                return total if self.scaler is None else total * self.scaler.scale

            with contextlib.nullcontext() if routers is None else routers.watched(0 if at is None else at.chunk):
                return self.schedule.call(self.forward, at, loss)

        like = activations_like(self.model, microbatches)
        with contextlib.nullcontext() if routers is None else routers.counted(self.loss_scale / samples):
            self.schedule.run(len(microbatches), forward, like, self.gradients.last_microbatch)
        self.gradients.finish()
        losses = torch.zeros(len(counts), dtype=torch.float64, device="cpu")
        if shares:
            losses = tree_of_samples(shares, self.run or len(shares)).cpu()
        if routers is None:
            return losses
        # Each rank of the tensor group has a part of each sequence; canonical layers route all of it on each rank.
        parts = self.grid.tensor if self.config.sequence_parallel and self.run is None else None
        return torch.cat((losses, routers.means(samples, parts)))

    def take_expert_tokens(self) -> list[list[int]] | None:
        """[layer][expert]: how many tokens of the steps since the last call had each expert; None without experts."""
        return None if self.routers is None else self.routers.take_tokens((self.replicas, self.grid.pipeline))

    def _overflowed(self, norm: float) -> bool:
        """Whether an fp16 gradient is not finite on any rank of the world. False in other precisions."""
        if self.scaler is None:
            return False
        # The ranks must agree: a replicated parameter's gradient may overflow on one rank of a tensor group only.
        return on_any_rank(not math.isfinite(norm), self.grid.tensor, self.replicas, self.grid.pipeline)

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
            iteration, lr=config.lr, min_lr=derived.last_lr(config), style=config.lr_decay_style,
            warmup_iters=derived.warmup_steps(config), decay_iters=config.lr_decay_iters or config.train_iters,
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
        return sum(math.prod(placement.shape) for placement in whole_placements(self.model).values())

    def close(self) -> None:
        """Free the hooks, what the objective has, and the grid."""
        getattr(self.objective, "close", lambda: None)()
        self.gradients.remove()
        if self.tied is not None:
            self.tied.close()
        self.grid.close()


def _loss_scaler(config: TrainSettings) -> LossScaler:
    if config.loss_scale is not None:
        return LossScaler(config.loss_scale, window=None)
    least = derived.least_loss_scale(config)
    return LossScaler(config.initial_loss_scale, config.loss_scale_window, config.hysteresis, least)


def require_compiler() -> None:
    """Raise UsageError unless this rank's machine has the C++ compiler that torch.compile calls."""
    command = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(command) is None:
        raise UsageError(
            f"--compile: needs a C++ compiler, and there is no {command} on PATH; install one, name it in CXX, or "
            "train without --compile"
        )
