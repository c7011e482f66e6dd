"""The held-out loss: every sample counted once, whatever divides what."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from commengine import ProcessGrid
from tplayers import GPT, GPTConfig, initialize
from trainers.data.samples import ZipfSamples
from trainers.run.evaluation import evaluate
from trainers.tasks.gpt import NextToken, TokenBatches

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

CONFIG = GPTConfig(1, 16, 4, 50, 8, init_method_std=0.5, make_vocab_size_divisible_by=64)  # dropout 0.1
WORDS = {"vocab_size": 50, "unusable": ""}


def gpt(comm):
    model = GPT(CONFIG, comm, dtype=torch.float64)
    initialize(model, 5)
    return model


def direct(model, samples, count):
    """The mean over the labels of the first samples, one sample at a time, on one rank."""
    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for n in range(min(count, len(samples))):
            row = torch.from_numpy(samples[n])
            logits = model(row[None, :-1])[0, :, :50]
            total += cross_entropy(logits, row[1:], reduction="sum").item()
            tokens += len(row) - 1
    return total / tokens, tokens


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("held_out", [1, 3, 8, 13, 16])
@pytest.mark.parametrize("micro", [1, 2])
def test_every_sample_counts_once(world, alone, held_out, tensor, micro):
    if world.size % tensor:
        pytest.skip(f"{world.size} ranks do not form groups of {tensor}")
    samples = ZipfSamples(50, 8, seed=1, count=held_out)
    with ProcessGrid(world, tensor=tensor) as grid:
        model = gpt(grid.tensor)
        batches = TokenBatches(samples, size=8, micro=micro, data=grid.data, **WORDS)
        for iterations in (1, 2, 100):
            loss, tokens = evaluate(model, NextToken(), batches, grid, iterations=iterations)["lm_loss"]
            expected, counted = direct(gpt(alone), samples, 8 * iterations)
            assert tokens == counted
            assert loss == pytest.approx(expected, rel=1e-10)
            assert world.mpi.allgather((loss, tokens)) == [(loss, tokens)] * world.size


def test_a_split_smaller_than_the_ranks(world, alone):
    """Ranks without a sample take part and count nothing."""
    samples = ZipfSamples(50, 8, seed=2, count=1)
    with ProcessGrid(world, tensor=1) as grid:
        batches = TokenBatches(samples, size=world.size, micro=1, data=grid.data, **WORDS)
        loss, tokens = evaluate(gpt(grid.tensor), NextToken(), batches, grid, iterations=3)["lm_loss"]
    assert tokens == 8
    assert loss == pytest.approx(direct(gpt(alone), samples, 1)[0], rel=1e-10)


def test_dropout_is_off_and_training_goes_on_as_before(world):
    with ProcessGrid(world, tensor=1) as grid:
        model = gpt(grid.tensor)
        before = [p.detach().clone() for p in model.parameters()]
        batches = TokenBatches(ZipfSamples(50, 8, 1, 5), size=world.size, micro=1, data=grid.data, **WORDS)
        losses = {evaluate(model, NextToken(), batches, grid, iterations=9)["lm_loss"] for _ in range(2)}
        assert len(losses) == 1
        assert model.training and all(layer.training for layer in model.modules())
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
