"""Each mechanism of ``bench.contest mechanisms`` as two training steps that differ in it alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.step_study.recorder import open_trainer
from bench.timing.slow_link import slow_down
from commengine import CartesianGrid, Communicator, trace
from commengine.host.switch_points import NEVER, SwitchPoints
from tplayers import FieldConv, initialize
from trainers.settings.commands import GPTSettings
from trainers.training.trainer import Trainer

#: one step of this rank, which returns the loss
Step = Callable[[], float]


class StepPair(NamedTuple):
    """The steps with a mechanism and without it.

    hidden: gets the share of the reductions' time that was hidden in each step with it; empty where nobody looks.
    """

    own: Step
    without: Step
    hidden: Sequence[float] = ()


#: a GPT of 4 million parameters: gradients of 16 MB
GPT = GPTSettings(
    num_layers=4, hidden_size=256, num_attention_heads=4, seq_length=256, vocab_size=2048, mock_data=True,
    micro_batch_size=2, hidden_dropout=0.0, attention_dropout=0.0, lr=1e-4,
)  # fmt: skip
#: elements of a bucket where buckets are overlapped: the GPT's gradients are eight, as a larger model's are by default
BUCKET = 500_000
#: a field of 128 x 128 points through 8 convolutions of 32 channels: 16 halos of 33 KB in a step of two ranks
POINTS, WIDTH, DEPTH, BATCH = 128, 32, 8, 2


@contextmanager
def bucket_overlap(world: Communicator, rate: float | None = None) -> Iterator[StepPair]:
    """Gradients are reduced in buckets while the backward goes on (--overlap-grad-reduce).

    rate: bytes per second to which the data group's transport is slowed down.
    """
    shares: list[float] = []

    def traced(trainer: Trainer) -> float:
        with trace(trainer.grid.data) as log:
            loss = float(trainer.step().loss)
        if trainer.config.overlap_grad_reduce:
            events = [event for event in log.events if event.bytes > 1000]
            shares.append(sum(event.hidden_seconds for event in events) / sum(event.seconds for event in events))
        return loss

    with ExitStack() as stack:
        steps = []
        for overlap in (True, False):
            config = dataclasses.replace(GPT, overlap_grad_reduce=overlap, ddp_bucket_size=BUCKET)
            trainer = stack.enter_context(closing(open_trainer(config, world)))
            if rate is not None:
                slow_down(trainer.grid.data, rate)
            steps.append(partial(traced, trainer))
        yield StepPair(steps[0], steps[1], shares)


@contextmanager
def two_levels(world: Communicator) -> Iterator[StepPair]:
    """Gradients are reduced inside each node in shared memory, then between nodes."""
    flat = SwitchPoints({key: point._replace(two_level=NEVER) for key, point in world.switch_points.rows.items()})
    with ExitStack() as stack:
        without = stack.enter_context(Communicator(world.mpi, device="cpu", switch_points=flat))
        yield StepPair(_gpt(stack, world, GPT), _gpt(stack, without, GPT))


def _gpt(stack: ExitStack, world: Communicator, config: GPTSettings) -> Step:
    trainer = stack.enter_context(closing(open_trainer(config, world)))
    return lambda: float(trainer.step().loss)


@contextmanager
def halo_overlap(world: Communicator) -> Iterator[StepPair]:
    """Halos travel while the inner points are convolved (FieldConv's overlap_stream)."""
    grid = CartesianGrid(world, (world.size, 1))
    yield StepPair(_field_step(grid, overlap=True), _field_step(grid, overlap=False))


class Together(FieldConv):
    """A FieldConv that waits for its halo and then convolves all points at once, as on one rank."""

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return self._together(x)


def _field_step(grid: CartesianGrid, *, overlap: bool) -> Step:
    field = grid.decompose((POINTS, POINTS))
    generator = torch.Generator().manual_seed(grid.comm.rank)
    x = torch.randn(BATCH, WIDTH, *field.local_shape(grid.coords), generator=generator)
    stream = grid.comm.new_stream() if overlap else None
    layers: list[FieldConv] = [
        FieldConv(WIDTH, WIDTH, 3, grid, field, padding=1, overlap_stream=stream) if overlap
        else Together(WIDTH, WIDTH, 3, grid, field, padding=1)
        for _ in range(DEPTH)
    ]  # fmt: skip
    model = nn.Sequential(*(module for layer in layers for module in (layer, nn.GELU())))
    initialize(model, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


#: the mechanisms by their names in --mechanisms
PAIRS = {one.__name__: one for one in (halo_overlap, bucket_overlap, two_levels)}


def refused(name: str, nodes: Sequence[Sequence[int]]) -> str | None:
    """The reason why a mechanism has nothing to do in a job, or None. nodes: of `starting.neighbours`."""
    if len(nodes) < 2:
        return "needs two ranks or more"
    sizes = {len(node) for node in nodes}
    if name == "two_levels" and (len(sizes) > 1 or not 1 < len(nodes[0]) < len(nodes)):
        return "needs two nodes or more, with as many ranks on each, two or more"
    return None
