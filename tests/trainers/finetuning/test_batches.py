"""Micro-batches: the same samples, lengths and numbers at every number of data ranks, and the loss of labels."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from commengine import UsageError
from trainers.finetuning.batches import KeptLogits, LabelledBatches, LabelLoss
from trainers.finetuning.samples import EncodedSamples, TaskSample

S = 24


class Numbered(EncodedSamples):
    """Sample n is of n % 17 + 3 tokens, all of which are n; ``choices`` rows of them."""

    shape = (3,)

    def __init__(self, count: int, choices: int = 0, labels: tuple[int, ...] = ()) -> None:
        self._count, self._choices, self._labels = count, choices, labels
        self.read: list[int] = []
        self.lengths = [n % 17 + 3 for n in range(count)]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, n: int) -> TaskSample:
        self.read.append(n)
        rows = (self._choices,) if self._choices else ()
        tokens = np.full((*rows, S), n)
        return TaskSample(tokens, tokens * 0, np.full(rows, self.lengths[n]), np.full(self._labels, n % 3))

    def described(self) -> str:
        return str((self._count, self._choices))


def batches(samples, ranks, rank, *, size=12, micro=2, fixed=False, multiple=1):
    data = SimpleNamespace(size=ranks, rank=rank)
    return LabelledBatches(
        samples, size=size, micro=micro, data=data, part="dev", vocab_size=100, unusable="", fixed=fixed,
        multiple=multiple,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("choices", [0, 4])
def test_what_fills_the_last_batch_is_no_longer_than_its_samples(ranks, choices):
    """Sample 0 is the longest of all here, and is not in the last batch."""
    samples = Numbered(14, choices)
    samples.lengths = [20, *[3] * 13]
    for rank in range(ranks):
        for batch in batches(samples, ranks, rank)(1):
            assert int(batch.padding.max()) <= batch.tokens.shape[-1] == 8


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("choices", [0, 4])
def test_each_sample_once_and_the_same_length_at_every_layout(ranks, choices):
    samples, lengths = Numbered(51, choices), {}
    seen, numbers = [], []
    for rank in range(ranks):
        mine = batches(samples, ranks, rank)
        for k in range(len(mine)):
            for batch in mine(k):
                real = [index for index in batch.indices if index >= 0]
                seen += real
                numbers += batch.numbers
                assert batch.counts == (len(real),) and batch.usable and batch.part == "dev"
                filler = k * 12  # the first sample of the global batch
                assert batch.tokens.flatten(1)[:, 0].tolist() == [
                    index if index >= 0 else filler for index in batch.indices
                ]
                assert len(batch.numbers) == batch.padding.numel()
                assert lengths.setdefault(k, batch.tokens.shape[-1]) == batch.tokens.shape[-1]
    assert sorted(seen) == list(range(51)) and len(set(numbers)) == len(numbers) == 60 * max(choices, 1)
    longest = [max(n % 17 + 3 for n in range(k * 12, min(k * 12 + 12, 51))) for k in range(5)]
    assert list(lengths.values()) == [-(-one // 8) * 8 for one in longest]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("fixed", [False, True])
def test_a_sample_is_read_once_a_pass(ranks, fixed):
    """To read a sample is to encode it. Only the first one of the last batch is read again, which fills it."""
    read = []
    for rank in range(ranks):
        samples = Numbered(51)
        mine = batches(samples, ranks, rank, fixed=fixed)
        for k in range(len(mine)):
            assert len([*mine(k)]) == 6 // ranks
        counts = np.bincount(samples.read, minlength=51)
        assert np.delete(counts, 48).max() == 1 and (fixed or counts.min() == 1)
        read += np.flatnonzero(counts).tolist()
    assert set(read) == set(range(51))


def test_fixed_and_rounded_lengths():
    assert next(iter(batches(Numbered(2), 1, 0, fixed=True)(0))).tokens.shape == (2, S)
    assert next(iter(batches(Numbered(2), 1, 0, multiple=3)(0))).tokens.shape == (2, 24)
    assert next(iter(batches(Numbered(2), 1, 0)(0))).tokens.shape == (2, 8)


def test_a_token_outside_the_vocabulary_is_not_usable():
    batch = next(iter(batches(Numbered(99), 1, 0)(0)))
    assert batch.usable
    batch.tokens[1, 2] = 100
    assert not batch.usable


@pytest.mark.parametrize("spans", [False, True])
def test_the_loss_and_what_is_kept(spans):
    """A sample that only fills the batch has no loss, and its logits are not kept."""
    samples = Numbered(3, labels=(2,) if spans else ())
    kept = KeptLogits({"dev": samples})
    shape = (S, 2) if spans else (3,)
    if spans:
        kept._kept["dev"] = torch.zeros(3, *shape)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, *shape, generator=generator)
    given = iter(logits.split(2))
    losses = []
    for batch in batches(samples, 1, 0, size=4, fixed=True)(0):
        (found,) = LabelLoss("nats/sample", kept)(lambda *_, **__: next(given), batch, None)
        losses += found.tolist()
    labels = [0, 1, 2]
    if spans:
        by_place = [F.cross_entropy(logits[:3, :, k], torch.tensor(labels), reduction="none") for k in (0, 1)]
        expected = (by_place[0] + by_place[1]) / 2
    else:
        expected = F.cross_entropy(logits[:3], torch.tensor(labels), reduction="none")
    assert losses == pytest.approx([*expected.tolist(), 0.0])
    alone = SimpleNamespace(all_reduce=lambda tensor: None)
    assert torch.equal(kept.gathered(alone)["dev"], logits[:3])


def test_logits_that_are_not_finite_are_an_error():
    kept = KeptLogits({"dev": Numbered(3)})
    kept._kept["dev"][1, 1] = torch.nan
    with pytest.raises(UsageError, match="dev: the model gives logits that are not finite"):
        kept.gathered(SimpleNamespace(all_reduce=lambda tensor: None))
