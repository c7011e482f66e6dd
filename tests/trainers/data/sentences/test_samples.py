"""BERT's samples: a function of (seed, epoch, index), with the statistics of Megatron-LM's and without its faults."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainers.data.indexed import IndexedDataset
from trainers.data.indexed_writer import IndexedDatasetWriter
from trainers.data.samples import NoSamplesError, philox
from trainers.data.sentences.samples import (
    IGNORED,
    MaskedSample,
    SampleRules,
    Sentences,
    SentenceSamples,
    ZipfSentences,
    cut_in_two,
    shortened,
)
from trainers.data.wordpiece import WordPieces

# Ids 5 to 999 begin a word, 1000 to 1999 continue one.
PIECES = WordPieces(
    pad=0, cls=2, sep=3, mask=4, continues=np.arange(2000) >= 1000, ordinary=np.arange(5, 2000, dtype=np.int64)
)
RULES = SampleRules(seq_length=512, seed=1234)


def sentence(rng: np.random.Generator, length: int) -> np.ndarray:
    tokens = np.where(rng.random(length) < 0.25, rng.integers(1000, 2000, length), rng.integers(5, 1000, length))
    tokens[0] = rng.integers(5, 1000)
    return tokens


def write(prefix: Path, documents: list[list[np.ndarray]]) -> IndexedDataset:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for sentences in documents:
            writer.add_document(np.concatenate(sentences), [len(one) for one in sentences])
    return IndexedDataset(prefix)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    """1 million tokens in documents of 200 sentences of 10 to 40 tokens."""
    rng = np.random.default_rng(0)
    documents = [[sentence(rng, int(n)) for n in rng.integers(10, 40, 200)] for _ in range(200)]
    return write(tmp_path_factory.mktemp("data") / "data", documents)


@pytest.fixture(scope="module")
def samples(dataset: IndexedDataset) -> SentenceSamples:
    return SentenceSamples(dataset, range(len(dataset)), PIECES, RULES)


@pytest.fixture(scope="module")
def drawn(samples: SentenceSamples) -> list[MaskedSample]:
    return [samples.draw(epoch, n) for epoch in (0, 1) for n in range(1250)]


def original(sample: MaskedSample) -> np.ndarray:
    """The sample's tokens before they were masked, without padding."""
    tokens = sample.tokens[: sample.length].copy()
    counted = sample.labels != IGNORED
    tokens[sample.positions[counted]] = sample.labels[counted]
    return tokens


def parts(sample: MaskedSample) -> tuple[np.ndarray, np.ndarray]:
    """A and B of the original, from the positions of [CLS] and [SEP]."""
    tokens = original(sample)
    assert tokens[0] == 2 and tokens[-1] == 3
    middle, last = np.flatnonzero(tokens == 3)
    return tokens[1:middle], tokens[middle + 1 : last]


@pytest.mark.slow
def test_a_full_sample_has_76_masks(drawn: list[MaskedSample]) -> None:
    full = [sample for sample in drawn if sample.length >= 505]
    masked = [(sample.labels != IGNORED).sum() for sample in full[:1000]]
    assert len(masked) == 1000
    assert max(masked) <= 76 and np.mean(masked) >= 75.5
    assert RULES.predictions == 76


def test_the_shares_of_masks_orders_and_short_samples(drawn: list[MaskedSample], samples: SentenceSamples) -> None:
    now = np.concatenate([one.tokens[one.positions[one.labels != IGNORED]] for one in drawn])
    then = np.concatenate([one.labels[one.labels != IGNORED] for one in drawn])
    assert abs((now == 4).mean() - 0.8) < 0.01
    assert abs((now == then).mean() - 0.1) < 0.01
    orders = [sample.order for sample in drawn[:2000]]
    assert set(orders) == {0, 1} and abs(np.mean(orders) - 0.5) < 0.03
    short = np.mean([samples.sentences(n).target < RULES.target for n in range(len(samples))])
    assert 0.07 < short < 0.13


def test_no_word_is_cut_or_joined_with_another_part(drawn: list[MaskedSample], dataset: IndexedDataset) -> None:
    """A part begins and ends where words of the text do, its words are masked whole, and [SEP] is never masked."""
    for sample in drawn[:600]:
        a, b = parts(sample)
        masked = np.zeros(512, dtype=bool)
        masked[sample.positions[sample.labels != IGNORED]] = True
        assert not masked[[0, 1 + len(a), sample.length - 1]].any()
        for part, offset in ((a, 1), (b, 2 + len(a))):
            inside = masked[offset : offset + len(part)]
            if sample.length > 100:  # else a part may be the beginning of a word that has no room
                assert part[0] < 1000, "a part begins inside of a word"
            cut = np.flatnonzero((part[1:] >= 1000) & (inside[1:] != inside[:-1]))
            assert not len(cut), "a word is masked in part"
        assert np.all(sample.types[: 2 + len(a)] == 0) and np.all(sample.types[2 + len(a) : sample.length] == 1)
        assert not sample.tokens[sample.length :].any() and not sample.types[sample.length :].any()
        assert len(a) + len(b) + 3 == sample.length <= 512


def test_the_text_is_that_of_the_data_in_the_order_that_the_label_says(
    samples: SentenceSamples, drawn: list[MaskedSample]
) -> None:
    for n in range(300):
        text = samples.sentences(n).tokens.tobytes()
        a, b = parts(drawn[n])
        first, second = (b, a) if drawn[n].order else (a, b)
        at = text.find(first.tobytes())
        assert at >= 0 and text.find(second.tobytes(), at + first.nbytes) >= 0


def test_a_sample_is_a_function_of_seed_epoch_and_index(dataset: IndexedDataset, samples: SentenceSamples) -> None:
    again = SentenceSamples(dataset, range(len(dataset)), PIECES, RULES)

    def same(one: MaskedSample, other: MaskedSample) -> bool:
        return all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))

    assert same(again.draw(3, 40), samples.draw(3, 40)) and same(samples[40], samples.draw(0, 40))
    assert not same(samples.draw(3, 40), samples.draw(4, 40))
    other = SentenceSamples(dataset, range(len(dataset)), PIECES, replace(RULES, seed=1, short_seq_prob=0.0))
    assert not same(other[0], samples[0])
    with pytest.raises(IndexError):
        samples[len(samples)]
    assert np.array_equal(samples.targets(40), samples[40].labels[samples[40].labels != IGNORED])
    counts = samples.token_counts(2000)
    assert np.array_equal(counts, np.bincount(dataset.tokens, minlength=2000))


def test_documents_of_one_sentence_have_no_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    data = write(tmp_path / "data", [[sentence(rng, 30)], [sentence(rng, 20), sentence(rng, 20)], [sentence(rng, 900)]])
    kept = SentenceSamples(data, range(3), PIECES, replace(RULES, short_seq_prob=0.0))
    assert [kept[n].order == IGNORED for n in range(len(kept))] == [True, False, True]
    assert [kept[n].length for n in (0, 1)] == [32, 43] and 505 < kept[2].length <= 511
    assert not kept[0].types.any() and (kept[0].labels != IGNORED).sum() == 5
    skipped = SentenceSamples(data, range(3), PIECES, replace(RULES, one_sentence=False))
    assert len(skipped) == 1 and skipped[0].order != IGNORED
    with pytest.raises(NoSamplesError, match="documents 0 to 1: no sentences that make a sample"):
        SentenceSamples(data, range(1), PIECES, replace(RULES, one_sentence=False))
    alone = SentenceSamples(data, range(3), PIECES, replace(RULES, pairs=False, short_seq_prob=0.0))
    assert [alone[n].order for n in range(3)] == [IGNORED] * 3 and alone[1].length == 42


def test_a_sample_without_a_word_that_fits_the_budget_has_no_mask(tmp_path: Path) -> None:
    word = np.concatenate(([10], np.arange(1000, 1020)))
    one = SentenceSamples(write(tmp_path / "data", [[word]]), range(1), PIECES, RULES)[0]
    assert one.length == 23 and np.all(one.labels == IGNORED) and np.array_equal(one.tokens[1:22], word)


def test_what_a_part_keeps() -> None:
    """Whole words from a random place; each token that goes is taken from the front or the back."""
    rng = np.random.default_rng(2)
    part = sentence(rng, 100)
    starts = set(np.flatnonzero(part < 1000)) | {0}
    begins = []
    for seed in range(300):
        kept = shortened(part, 60, PIECES, philox(seed))
        at = part.tobytes().index(kept.tobytes()) // 8
        assert at in starts and (at + len(kept) in starts or at + len(kept) == 100)
        assert 45 < len(kept) <= 60
        begins.append(at)
    assert 18 < np.mean(begins) < 23 and min(begins) < 14 and max(begins) > 26  # 20 of 40 from the front
    whole = np.concatenate(([10], np.arange(1000, 1040)))
    assert np.array_equal(shortened(whole, 5, PIECES, philox(0)), whole[:5])  # one word: there is no whole one to keep
    assert shortened(part, 100, PIECES, philox(0)) is part


@pytest.mark.parametrize(
    ("lengths", "kept"), [((30, 900), (30, 479)), ((900, 30), (479, 30)), ((300, 300), (255, 254))]
)
def test_the_longer_part_is_shortened(lengths: tuple[int, int], kept: tuple[int, int]) -> None:
    tokens = np.arange(sum(lengths)) % 900 + 5
    for seed in range(20):
        a, b, order = cut_in_two(Sentences(tokens, np.array(lengths), 509), True, PIECES, philox(seed))
        assert (len(a), len(b)) == (kept if order == 0 or lengths[0] == lengths[1] else kept[::-1])


def test_the_cut_is_at_every_sentence_but_the_first() -> None:
    text = Sentences(np.arange(5, 45), np.array([10, 10, 10, 10]), 100)
    cuts = [cut_in_two(text, True, PIECES, philox(seed)) for seed in range(300)]
    firsts = [len(b) if order else len(a) for a, b, order in cuts]
    assert set(firsts) == {10, 20, 30} and min(firsts.count(n) for n in (10, 20, 30)) > 70


def test_mock_data() -> None:
    pieces = WordPieces.mock(100)
    mock = ZipfSentences(pieces, replace(RULES, seq_length=64), 1000)
    one = mock.draw(2, 999)
    assert one.length == 64 and one.order in (0, 1) and (one.labels != IGNORED).sum() == 9
    a, b = parts(one)
    assert min(a.min(), b.min()) >= 5 and max(a.max(), b.max()) < 100 and len(a) + len(b) == 61
    counts = mock.token_counts(128)
    assert not counts[:5].any() and not counts[100:].any() and counts[5] > counts[6] > counts[99] > 0
    shortest = ZipfSentences(pieces, replace(RULES, seq_length=5), 10)[3]
    assert shortest.length == 5 and shortest.order in (0, 1)
