"""A model that is not of this repository, with two losses that count differently on every rank, and its trainer."""

import sys
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from commengine import ProcessGrid, UsageError
from trainers.run.evaluation import evaluate
from trainers.settings.commands import TrainSettings
from trainers.settings.rules import require_valid
from trainers.training.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

WIDTH, SIZE, STEPS = 5, 8, 6
CONFIG = TrainSettings(
    lr=1e-2, min_lr=0.0, lr_decay_style="constant", weight_decay=0.1, clip_grad=0.5, micro_batch_size=2,
    global_batch_size=SIZE, train_iters=STEPS, ddp_bucket_size=40,
)  # fmt: skip


class Regression(nn.Module):
    """Two outputs a row: a number, and the score of a class."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())
        self.number, self.score = nn.Linear(8, 1), nn.Linear(8, 1, bias=False)
        self.double()

    def forward(self, x):
        hidden = self.body(x)
        return self.number(hidden).squeeze(-1), self.score(hidden).squeeze(-1)


def row(number):
    """(Inputs, what the number is to be, the class or -1 where that is not known) of a sample: few have a class."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(WIDTH, dtype=torch.float64, generator=generator)
    return x, x.square().sum(), 1.0 * (x[0] > 0) if number % SIZE in (0, 1, 2, 5) else torch.tensor(-1.0)


@dataclass(frozen=True)
class Rows:
    x: torch.Tensor
    y: torch.Tensor
    known: torch.Tensor
    numbers: tuple[int, ...]
    usable: bool = True

    @property
    def counts(self):
        return len(self.numbers), int((self.known >= 0).sum())

    def to(self, device):
        return replace(self, x=self.x.to(device), y=self.y.to(device), known=self.known.to(device))


def rows(numbers):
    return Rows(*(torch.stack(column) for column in zip(*map(row, numbers), strict=True)), tuple(numbers))


class Source:
    """Global batch k is the samples from number 8 k on. Batch ``bad`` has a sample that is not usable, on one rank."""

    size, unusable = SIZE, "a row is not a number"

    def __init__(self, data, bad=None):
        self.data, self.bad = data, bad

    def __len__(self):
        return 3

    def __call__(self, k):
        mine = SIZE // self.data.size
        first = k * SIZE + self.data.rank * mine
        for start in range(first, first + mine, 2):
            yield replace(rows(range(start, start + 2)), usable=(k, self.data.rank) != (self.bad, self.data.size - 1))


class TwoLosses:
    names = ("number", "class")
    unit = "nats"

    def __call__(self, model, batch, randomness):
        number, score = model(batch.x)
        known = batch.known >= 0
        of_class = nn.functional.binary_cross_entropy_with_logits(score, batch.known.double(), reduction="none")
        return (number - batch.y).abs().sum(), of_class * known  # a sum, or a loss for each item


def plain_torch():
    """One process, whole batches, with nothing of the trainers': the losses and norms by step, and the model."""
    model, done = Regression(), []
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2)
    for step in range(STEPS):
        batch = rows(range(step * SIZE, (step + 1) * SIZE))
        known = batch.known >= 0
        adamw.zero_grad()
        number, score = model(batch.x)
        first = (number - batch.y).abs().mean()
        second = nn.functional.binary_cross_entropy_with_logits(score[known], batch.known[known].double())
        (first + second).backward()
        norm = nn.utils.clip_grad_norm_(parameters, 0.5)
        adamw.step()
        done.append({"number": first.item(), "class": second.item(), "norm": norm.item()})
    return done, model


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_of_someone_elses_is_trained_as_by_a_plain_loop(world, overlap, shard):
    config = replace(CONFIG, overlap_grad_reduce=overlap, use_distributed_optimizer=shard)
    require_valid(config, world.size)
    grid = ProcessGrid(world, tensor=1)
    trainer = Trainer(config, grid, Regression(), TwoLosses(), Source(grid.data))
    steps = [trainer.step() for _ in range(STEPS)]
    trainer.optimizer.wait_for_parameters()
    expected, model = plain_torch()
    assert min(step["norm"] for step in expected) > 2 * 0.5  # all are clipped
    for step, other in zip(steps, expected, strict=True):
        assert {**step.losses, "norm": step.norm} == pytest.approx(other, rel=1e-9)
        assert step.loss == pytest.approx(other["number"] + other["class"], rel=1e-9)
    for (name, ours), theirs in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-7, atol=1e-9, msg=name)
    assert trainer.parameters() == sum(p.numel() for p in model.parameters())

    means = evaluate(trainer.model, trainer.objective, Source(grid.data), grid, iterations=2)
    batch = rows(range(2 * SIZE))
    known = batch.known >= 0
    with torch.no_grad():
        number, score = model(batch.x)
        of_class = nn.functional.binary_cross_entropy_with_logits(score[known], batch.known[known].double())
    assert means["number"] == (pytest.approx((number - batch.y).abs().mean().item(), rel=1e-7), 2 * SIZE)
    assert means["class"] == (pytest.approx(of_class.item(), rel=1e-6), 8)
    trainer.close()


def test_a_batch_that_is_not_usable_on_one_rank_is_an_error_on_all(world):
    grid = ProcessGrid(world, tensor=1)
    trainer = Trainer(CONFIG, grid, Regression(), TwoLosses(), Source(grid.data, bad=1))
    trainer.step()
    with pytest.raises(UsageError, match=r"^step 2: a row is not a number$"):
        trainer.step()
    with pytest.raises(UsageError, match=r"^a row is not a number$"):
        evaluate(trainer.model, trainer.objective, trainer.batches, grid, iterations=3)
    trainer.close()


class Reads(TorchFunctionMode):
    """Counts the values that are read from tensors: for each the host waits until the device has computed it."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__")
        return function(*args, **(kwargs or {}))


def test_a_step_reads_as_few_values_with_many_microbatches_as_with_one(world):
    counts = []
    for micro in (1, SIZE // world.size):
        grid = ProcessGrid(world, tensor=1)

        class Cut(Source):
            def __call__(self, k, micro=micro):
                first = k * SIZE + self.data.rank * SIZE // world.size
                for start in range(first, first + SIZE // world.size, micro):
                    yield rows(range(start, start + micro))

        trainer = Trainer(CONFIG, grid, Regression(), TwoLosses(), Cut(grid.data))
        with Reads() as reads:
            trainer.step()
        counts.append(reads.count)
        trainer.close()
    assert counts[0] == counts[1] > 0


def test_losses_are_float64_sums_of_the_microbatches_float32_shares(world):
    """Bit for bit, on the host: what a Python float would add up."""
    shares = [0.0, 0.0]

    class Recorded(TwoLosses):
        def __call__(self, model, batch, randomness):
            terms = [losses.float() for losses in super().__call__(model, batch, randomness)]
            for n, (losses, count) in enumerate(zip(terms, (SIZE, 4), strict=True)):
                shares[n] += (losses.detach().sum() / count).item()
            return terms

    grid = ProcessGrid(world, tensor=1)
    trainer = Trainer(CONFIG, grid, Regression(), Recorded(), Source(grid.data))
    found = trainer.step().losses
    ranks = world.mpi.allgather(shares)
    expected = dict(zip(TwoLosses.names, map(sum, zip(*ranks, strict=True)), strict=True))
    assert found == (expected if world.size <= 2 else pytest.approx(expected, rel=1e-15))
    trainer.close()


def test_a_step_does_not_import_torchs_compiler(world, monkeypatch):
    """The import takes each rank a second, at every start of a run."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # so that an import of it is an error
    grid = ProcessGrid(world, tensor=1)
    trainer = Trainer(CONFIG, grid, Regression(), TwoLosses(), Source(grid.data))
    trainer.step()
    trainer.close()
