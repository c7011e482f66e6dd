"""Trainers of the small models of `tests.support.small_models`, at any layout, on samples that a number decides."""

from dataclasses import dataclass, replace

import pytest
import torch

from commengine import Communicator, ProcessGrid
from commengine.options.declared import option
from tests.support.small_models import DECODERS, VOCAB, S, made
from tplayers import ContextGroup, ModelPart, placements
from tplayers.formulas import cut_layers
from tplayers.rng import generator
from trainers.settings.commands import TrainSettings
from trainers.settings.same_bits import SameBitsOptions
from trainers.training.trainer import Trainer

#: without clipping, so that a step leaves the gradients as they were reduced
CONFIG = TrainSettings(
    lr=1e-3, min_lr=0.0, lr_decay_style="constant", weight_decay=0.1, clip_grad=0.0, micro_batch_size=2,
    global_batch_size=8, train_iters=20, ddp_bucket_size=900,
)  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Samples by their numbers."""

    kind: str
    numbers: tuple[int, ...]
    tokens: torch.Tensor
    labels: torch.Tensor
    usable: bool = True

    @property
    def counts(self):
        of_order = () if self.kind in DECODERS else (len(self.numbers),)
        return (int((self.labels != -100).sum()), *of_order)

    @property
    def read(self):
        return (self.tokens,)

    def to(self, device):
        return replace(self, tokens=self.tokens.to(device), labels=self.labels.to(device))


def sample(number):
    drawn = torch.randint(VOCAB, (S + 1,), generator=generator(number, "sample"))
    labels = drawn[1:].clone()
    labels[: number % 3] = -100  # so that micro-batches count differently
    return drawn[:-1], labels


class Batches:
    """Global batches of 8 samples, in micro-batches of ``micro``."""

    unusable = ""

    def __init__(self, kind, data, *, micro=2, size=8):
        self.kind, self.data, self.micro, self.size = kind, data, micro, size

    def __call__(self, k):
        mine = self.size // self.data.size
        first = k * self.size + self.data.rank * mine
        for start in range(first, first + mine, self.micro):
            numbers = tuple(range(start, start + self.micro))
            tokens, labels = (torch.stack(rows) for rows in zip(*map(sample, numbers), strict=True))
            yield Batch(self.kind, numbers, tokens, labels)


class Losses:
    """The losses of a small model of a kind."""

    unit = "nats"

    def __init__(self, kind):
        self.kind = kind
        self.names = ("loss",) if kind in DECODERS else ("loss", "order_loss")

    def __call__(self, model, batch, randomness):
        if self.kind in DECODERS:
            return (model(batch.tokens, batch.labels, randomness),)
        order = torch.tensor([number % 2 for number in batch.numbers])
        lengths = torch.tensor([S - number % 3 for number in batch.numbers])
        types = (batch.tokens > VOCAB // 2).long()
        return model(batch.tokens, types, lengths, labels=batch.labels, order_labels=order, randomness=randomness)


def parts(layers, stages, chunks=1):
    """The part of each stage."""
    cut = cut_layers(layers, stages * chunks)
    return [ModelPart(layers, tuple(cut[stage::stages])) for stage in range(stages)]


@dataclass(frozen=True)
class Canonical(SameBitsOptions, TrainSettings):
    """A run that computes in 4 canonical shards."""

    deterministic: bool = option(True, "")
    deterministic_shards: int | None = option(4, "")


def trainer(
    kind, grid, *, config=CONFIG, chunks=1, layers=5, dtype=torch.float64, micro=2, size=8, canonical=None,
    method="ulysses", canonical_parts=None, **options,
):  # fmt: skip
    """A trainer on ``grid`` of a small model. canonical: shards in which it computes. options: of the model.

    method: of the context group. canonical_parts: of each sequence.
    """
    part = parts(layers, grid.pipeline.size, chunks)[grid.pipeline.rank]
    if grid.expert.size > 1 and "num_experts" in options:
        options["expert_group"] = grid.expert
    if grid.context.size > 1:
        options["context"] = ContextGroup(grid.context, method, causal=kind in DECODERS)
    model = made(kind, grid.tensor, dtype=dtype, part=part, num_layers=layers, **options)
    config = replace(config, sequence_parallel=model.config.sequence_parallel)
    if canonical is not None:
        from tplayers import use_canonical_shards

        use_canonical_shards(model, grid.tensor, canonical, canonical_parts)
    return Trainer(config, grid, model, Losses(kind), Batches(kind, grid.data, micro=micro, size=size))


def gradients(made):
    """The gradient of each parameter of this rank, whole if it is not sharded over the data group."""
    found = {}
    for bucket in made.gradients.buckets:
        for parameter, name in bucket.layout.names.items():
            found[name] = parameter.grad if bucket.gradients is None else bucket.views[parameter]
    return {name: one.clone() for name, one in found.items()}


def alone(comm_self, kind, *, config=CONFIG, order=None, **options):
    """The trainer of the whole model on this rank."""
    world = Communicator(comm_self, order=order)
    return trainer(kind, ProcessGrid(world), config=config, **options)


def steps_of(made, count):
    """(Step, gradients, parameters after it) for each of the next ``count`` steps of a trainer of the whole model."""
    found = []
    for _ in range(count):
        step = made.step()
        parameters = {name: one.detach().clone() for name, one in made.model.named_parameters()}
        found.append((step, gradients(made), parameters))
    return found


def require_steps(made, truth, case=""):
    """That the next steps of a trainer are those of `steps_of`, to 1e-10.

    Losses, norms and parameters, and without ZeRO-1 all gradients, of which Adam would hide a factor.
    """
    close = {"rtol": 1e-10, "atol": 1e-12}
    placed = placements(made.model)
    for expected, of_whole, parameters in truth:
        step = made.step()
        for mine, theirs in ((step.losses, expected.losses), (step.router_losses, expected.router_losses)):
            assert dict(mine) == pytest.approx(dict(theirs), rel=1e-10), case
        assert step.norm == pytest.approx(expected.norm, rel=1e-10), case
        for name, gradient in gradients(made).items() if not made.gradients.shard else ():
            torch.testing.assert_close(gradient, placed[name].part(of_whole[name]), msg=f"{name}, {case}", **close)
        made.optimizer.wait_for_parameters()
        for name, parameter in made.model.named_parameters():
            torch.testing.assert_close(parameter.detach(), placed[name].part(parameters[name]), **close)
