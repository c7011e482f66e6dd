"""Counts that the ranks share: those of one rank, and no rank waits for another as long as the whole count takes."""

import time
from typing import Any

import numpy as np
import pytest

from commengine import Communicator, UsageError
from trainers.data.indexed import IndexedDataset
from trainers.data.indexed_writer import IndexedDatasetWriter
from trainers.data.samples import TokenSamples, ZipfSamples, count_tokens
from trainers.tasks import unigram

pytestmark = pytest.mark.mpi
TOKENS = 1003


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> TokenSamples:
    prefix = tmp_path_factory.mktemp("tokens") / "a"
    with IndexedDatasetWriter(prefix, "u2") as writer:
        writer.add_document(np.random.default_rng(3).integers(0, 50, TOKENS))
    return TokenSamples(IndexedDataset(prefix), range(1), 8)


@pytest.mark.parametrize("at_once", [1, 7, 100, 5000])
@pytest.mark.every_size
def test_the_ranks_count_each_token_once(
    world: Communicator, samples: TokenSamples, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unigram, "_TOKENS", max(at_once, 20))
    monkeypatch.setattr(unigram, "_SAMPLES", at_once)
    assert np.array_equal(unigram.text_counts(samples, 50, world), samples.token_counts(50))
    for size in (0, 1, 50):
        expected = np.zeros(50, dtype=np.int64)
        for n in range(size):
            expected += np.bincount(samples.targets(n), minlength=50)
        assert np.array_equal(unigram.target_counts(samples, size, 50, world), expected)
    mock = ZipfSamples(50, 8, 0, 10)
    assert np.array_equal(unigram.text_counts(mock, 50, world), mock.token_counts(50))
    with pytest.raises(UsageError, match="is outside the vocabulary of 30"):
        unigram.text_counts(samples, 30, world)


@pytest.mark.long
@pytest.mark.slow
def test_a_long_count_is_within_the_timeout(
    mpi_world: Any, samples: TokenSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole takes longer than the timeout of a collective, and a round on one slow rank does not."""
    rounds = 8

    def slow(*args: Any) -> Any:
        if mpi_world.rank == 0:
            time.sleep(0.5)
        return count_tokens(*args)

    monkeypatch.setattr(unigram, "count_tokens", slow)
    monkeypatch.setattr(unigram, "_TOKENS", -(-TOKENS // (rounds * mpi_world.size)))
    with Communicator(mpi_world, timeout=2.0) as world:
        found = unigram.text_counts(samples, 50, world)
    assert int(found.sum()) == TOKENS
