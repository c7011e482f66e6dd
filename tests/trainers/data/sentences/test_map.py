"""Which sentences form a sample: Megatron-LM's rule, held against a loop over documents and sentences."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from trainers.data.indexed import IndexedDataset
from trainers.data.indexed_writer import IndexedDatasetWriter
from trainers.data.samples import SHORT, philox
from trainers.data.sentences import map as module
from trainers.data.sentences.map import sentence_map

SEED = 5


def dataset(folder: Path, documents: list[list[int]]) -> IndexedDataset:
    """A data set of documents with these sentence lengths; its tokens count up from 0."""
    at = 0
    with IndexedDatasetWriter(folder / "data", np.int32) as writer:
        for lengths in documents:
            writer.add_document(np.arange(at, at + sum(lengths)), lengths)
            at += sum(lengths)
    return IndexedDataset(folder / "data")


def by_hand(
    data: IndexedDataset, documents: range, target: int, short: float, *, pairs: bool, one_sentence: bool
) -> list[tuple[int, int, int, int]]:
    """(start, first, stop, target) of each sample, one sentence at a time, as `build_mapping` of Megatron-LM does."""
    begins = data.document_sequences
    raw = philox(SEED, SHORT).random_raw(int(begins[documents.stop] - begins[documents.start]))
    offsets = np.concatenate(([0], np.cumsum(data.sequence_lengths)))
    found = []
    for number in documents:
        stop = int(begins[number + 1])
        at = int(begins[number])
        if pairs and not one_sentence and stop - at < 2:
            continue
        while at < stop:
            draw = int(raw[at - begins[documents.start]])
            wanted = 2 + (draw & 0xFFFFFFFF) % (target - 1) if (draw >> 32) / 2**32 < short else target
            end, size = at, 0
            while end < stop:
                size += int(data.sequence_lengths[end])
                end += 1
                if size >= wanted and (not pairs or (end - at > 1 and stop - end > 1)):
                    break
            found.append((int(offsets[at]), at, end, wanted))
            at = end
    return found


def found(data: IndexedDataset, documents: range, target: int, short: float, **options: bool) -> list[tuple[int, ...]]:
    columns = sentence_map(data, documents, target=target, short_seq_prob=short, seed=SEED, **options)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    """Documents of 1 to 30 sentences, of 1 to 40 tokens each, and one long document."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 40, rng.integers(1, 30)).tolist() for _ in range(200)]
    documents[17] = rng.integers(1, 40, 3000).tolist()
    documents[18:23] = [[7], [300], [1, 1], [2], [3, 4, 5]]
    return dataset(tmp_path_factory.mktemp("mixed"), documents)


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("one_sentence", [True, False])
@pytest.mark.parametrize(("target", "short"), [(125, 0.0), (125, 0.1), (20, 0.5), (2, 0.0)])
def test_samples_are_those_of_a_loop(
    mixed: IndexedDataset, monkeypatch: pytest.MonkeyPatch, pairs: bool, one_sentence: bool, target: int, short: float
) -> None:
    for documents in (range(len(mixed)), range(10, 60), range(18, 19), range(0)):
        expected = by_hand(mixed, documents, target, short, pairs=pairs, one_sentence=one_sentence)
        assert found(mixed, documents, target, short, pairs=pairs, one_sentence=one_sentence) == expected
        monkeypatch.setattr(module, "_BLOCK", 50)  # many blocks, and a document that is larger than one
        assert found(mixed, documents, target, short, pairs=pairs, one_sentence=one_sentence) == expected
        monkeypatch.undo()


def test_every_sentence_is_in_one_sample_and_a_pair_has_two(mixed: IndexedDataset) -> None:
    samples = found(mixed, range(len(mixed)), 125, 0.1, pairs=True, one_sentence=False)
    several = np.diff(mixed.document_sequences) > 1
    assert sum(stop - first for _, first, stop, _ in samples) == np.diff(mixed.document_sequences)[several].sum()
    assert all(one[2] <= other[1] for one, other in pairwise(samples))
    assert min(stop - first for _, first, stop, _ in samples) == 2
    assert 0.05 < np.mean([target < 125 for *_, target in samples]) < 0.15


class Sequences:
    """The index of a data set with documents and sentences that have no token, which Megatron-LM's may have."""

    def __init__(self, documents: list[list[int]]) -> None:
        self.sequence_lengths = np.array([n for lengths in documents for n in lengths], dtype=np.int32)
        self.document_sequences = np.concatenate(([0], np.cumsum([len(lengths) for lengths in documents]))).astype(int)
        self.document_offsets = np.concatenate(([0], np.cumsum([sum(lengths) for lengths in documents]))).astype(int)


def test_documents_and_sentences_without_tokens_are_no_samples_and_no_hang() -> None:
    data = Sequences([[], [0, 0], [5, 0, 5], [], [0, 4, 0], [3, 3], []])
    every = range(len(data.document_sequences) - 1)
    assert found(data, every, 100, 0.0, pairs=True, one_sentence=True) == [
        (0, 2, 5, 100), (10, 6, 7, 100), (14, 8, 10, 100)
    ]  # fmt: skip
    assert found(data, every, 100, 0.0, pairs=True, one_sentence=False) == [(0, 2, 5, 100), (14, 8, 10, 100)]
    for nothing in ([], [[]], [[], [0]]):
        assert found(Sequences(nothing), range(len(nothing)), 100, 0.1, pairs=True, one_sentence=True) == []
