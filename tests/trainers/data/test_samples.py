"""Samples: each token once, each sample a function of its number alone."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from trainers.data import samples
from trainers.data.indexed import IndexedDataset
from trainers.data.indexed_writer import IndexedDatasetWriter
from trainers.data.samples import (
    TokenSamples,
    ZipfSamples,
    mixed_counts,
    split_documents,
    unigram_cross_entropy,
)

# What these gave once. A change here changes the data of every run that is resumed.
ZIPF_1234 = [208, 57, 25681, 0, 1, 72, 14, 8]
ZIPF_DIGEST = "d8b1123a74efd854"


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    """Ten documents of 1 to 10 tokens; the tokens count up from 0 to 54."""
    with IndexedDatasetWriter(tmp_path / "count", "u2") as writer:
        for n in range(1, 11):
            writer.add_document(np.arange(n) + n * (n - 1) // 2)
    return IndexedDataset(tmp_path / "count")


@pytest.mark.parametrize(
    "documents,split,borders",
    [
        (1000, "969,30,1", (969, 999)),
        (10, "1", (10, 10)),
        (10, "0,1", (0, 10)),
        (10, " 0.5, 0.25 ,0.25", (5, 8)),
        (3, "1,1,1", (1, 2)),
        (7, "98,1,1", (7, 7)),
        (0, "98,1,1", (0, 0)),
    ],
)
def test_split_documents(documents: int, split: str, borders: tuple[int, int]) -> None:
    train, valid, test = split_documents(documents, split)
    assert (train.stop, valid.stop) == borders
    assert [*train, *valid, *test] == list(range(documents))


@pytest.mark.parametrize("documents", [1, 2, 9, 10, 101, 12345])
@pytest.mark.parametrize("split", ["969,30,1", "0.1,0.2,0.7", "1e9,1e-9,3", "7,0,3"])
def test_split_covers_every_document_once(documents: int, split: str) -> None:
    assert [n for part in split_documents(documents, split) for n in part] == list(range(documents))


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "inf", "1;2", "1,,1", "1/0"])
def test_bad_split(split: str) -> None:
    with pytest.raises(ValueError, match="969,30,1"):
        split_documents(10, split)


def test_samples_are_the_documents_in_order(dataset: IndexedDataset) -> None:
    found = TokenSamples(dataset, range(10), seq_length=6)
    assert len(found) == 9  # 54 predictions
    for n in range(9):
        assert found[n].dtype == np.int64
        assert found[n].tolist() == list(range(6 * n, 6 * n + 7))


def test_samples_of_a_split_stay_in_it(dataset: IndexedDataset) -> None:
    found = TokenSamples(dataset, range(4, 6), seq_length=5)  # tokens 10 to 20
    assert [found[n].tolist() for n in range(len(found))] == [
        [10, 11, 12, 13, 14, 15],
        [15, 16, 17, 18, 19, 20],
    ]


def test_samples_can_be_changed(dataset: IndexedDataset) -> None:
    found = TokenSamples(dataset, range(10), seq_length=4)
    found[0][:] = 99
    assert found[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("n", [-1, 9])
def test_sample_out_of_range(dataset: IndexedDataset, n: int) -> None:
    with pytest.raises(IndexError, match="of 9"):
        TokenSamples(dataset, range(10), seq_length=6)[n]


@pytest.mark.parametrize("documents,tokens", [(range(3), 6), (range(10, 10), 0), (range(0), 0)])
def test_no_samples(dataset: IndexedDataset, documents: range, tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"count, documents .*: {tokens} tokens .* --seq-length 6 needs 7"):
        TokenSamples(dataset, documents, seq_length=6)


def test_token_counts(dataset: IndexedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_COUNT_CHUNK", 7)  # many chunks
    counts = TokenSamples(dataset, range(4, 10), seq_length=6).token_counts(60)
    assert counts.dtype == np.int64
    assert counts.tolist() == [0] * 10 + [1] * 45 + [0] * 5


def test_a_token_outside_the_vocabulary_is_named(dataset: IndexedDataset) -> None:
    with pytest.raises(ValueError, match="token 54 is outside the vocabulary of 54"):
        TokenSamples(dataset, range(10), seq_length=6).token_counts(54)


def test_zipf_samples_do_not_depend_on_order() -> None:
    first, second = (ZipfSamples(100, 16, seed=3, count=20) for _ in range(2))
    forward = [first[n].tolist() for n in range(20)]
    assert forward == [second[n].tolist() for n in reversed(range(20))][::-1]
    assert len({tuple(sample) for sample in forward}) == 20
    assert first[0].shape == (17,) and first[0].dtype == np.int64


def test_zipf_samples_are_these_for_ever() -> None:
    assert ZipfSamples(50257, 7, seed=1234, count=1)[0].tolist() == ZIPF_1234
    digest = hashlib.sha256(ZipfSamples(50257, 512, seed=1, count=9, split=2)[8].astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == ZIPF_DIGEST


def test_zipf_seed_and_split_separate_streams() -> None:
    seen = {
        tuple(ZipfSamples(1000, 32, seed, count=2, split=split)[n])
        for seed in (0, 1, 2**70)
        for split in (0, 1)
        for n in (0, 1)
    }
    assert len(seen) == 12


def test_zipf_frequencies() -> None:
    mock = ZipfSamples(50, 1000, seed=5, count=100)
    expected = mock.token_counts(64)
    found = np.bincount(np.concatenate([mock[n] for n in range(100)]), minlength=64)
    assert found[50:].sum() == 0 and expected[50:].sum() == 0
    assert expected.sum() == pytest.approx(100 * 1001)
    assert expected[0] / expected[9] == pytest.approx(10)
    # Counts are binomial: six standard deviations.
    assert np.all(np.abs(found - expected) <= 6 * np.sqrt(expected + 1))


def test_unigram_cross_entropy_by_hand() -> None:
    # p = (3 + 1, 0 + 1) / 5
    assert unigram_cross_entropy([3, 0], [1, 1]) == pytest.approx(-(np.log(0.8) + np.log(0.2)) / 2)


def test_mixed_counts_by_hand() -> None:
    """8 tokens, half of them from either source, whatever they have; one that has none is left out."""
    assert mixed_counts([[3, 3, 0], [0, 1, 1]], [0.5, 0.5]).tolist() == [2.0, 4.0, 2.0]
    assert mixed_counts([[3, 1, 0], [0, 0, 0], [0, 2, 2]], [3, 2, 1]).tolist() == [4.5, 2.5, 1.0]
    assert mixed_counts([[0, 0]], [1.0]).tolist() == [0.0, 0.0]
