"""Exact 5-grams against Python's sets; sketches against the formula of their bands, and against datasketch."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.corpora import altered, paragraphs, similarity
from trainers.cleaning.grams import BANDS, GRAM, ROWS, band_keys, gram_sets, jaccard

TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXTS | st.text("ab", max_size=60), min_size=2, max_size=5))
@pytest.mark.slow
def test_similarities_are_exact(texts):
    sets = gram_sets(texts)
    for first, one in zip(texts, sets, strict=True):
        for second, other in zip(texts, sets, strict=True):
            assert jaccard(one, other) == similarity(first, second)


def test_alphabets_that_do_not_fit_five_times_into_64_bits():
    rng = random.Random(0)
    first = "".join(map(chr, rng.choices(range(0x4E00, 0x9FFF), k=9000)))  # Chinese: thousands of characters
    second = "".join(rng.choice(first) if rng.random() < 0.02 else letter for letter in first)
    assert len(set(first)) > 4096
    one, other, short = gram_sets([first, second, "abc"])
    assert jaccard(one, other) == similarity(first, second) > 0.8
    assert len(short) == 0 and jaccard(short, short) == 0.0


def found(pairs):
    return np.mean([(keys[0] == keys[1]).any() for keys in map(band_keys, pairs)])


@pytest.mark.slow
@pytest.mark.parametrize("length", [60, 250, 1000])
def test_similar_texts_share_a_band(length):
    rng = random.Random(length)
    pairs: dict[int, list[tuple[float, str, str]]] = {tenth: [] for tenth in range(11)}
    for text in paragraphs(900, words=length // 4, seed=1):
        start = text[:length]
        copy = altered(start, rng.choice((0.02, 0.05, 0.1, 0.2, 0.3)), rng)
        value = similarity(start, copy)
        pairs[int(10 * value)].append((value, start, copy))
    above = [(one, other) for tenth in (7, 8, 9, 10) for _, one, other in pairs[tenth]]
    assert len(above) > 150 and found(above) > 0.99
    assert found([(pair[0], other[1]) for pair, other in zip(above, above[7:], strict=False)]) < 0.05  # unlike texts
    # Below, the share is about what 25 bands of 5 rows give.
    for tenth in (3, 4, 5):
        if len(pairs[tenth]) >= 80:
            wanted = np.mean([1 - (1 - value**ROWS) ** BANDS for value, *_ in pairs[tenth]])
            assert found([pair for _, *pair in pairs[tenth]]) == pytest.approx(wanted, abs=0.12)


def test_keys_depend_on_the_text_alone():
    texts = [text[:size] for text, size in zip(paragraphs(30, seed=3), range(GRAM, 400), strict=False)]
    together = band_keys(texts)
    assert together.shape == (30, BANDS) and together.dtype == np.uint64
    for text, keys in zip(texts, together, strict=True):
        assert np.array_equal(band_keys([text])[0], keys)
    assert len(np.unique(together)) > 0.95 * together.size  # short texts, too: an empty bin is filled from another


@pytest.mark.slow
def test_as_many_pairs_are_found_as_by_datasketch():
    datasketch = pytest.importorskip("datasketch")
    rng = random.Random(5)
    pairs = []
    for text in paragraphs(400, seed=100):
        copy = altered(text, rng.uniform(0.15, 0.35), rng)
        if 0.4 < similarity(text, copy) < 0.65:  # where bands miss some
            pairs.append((text, copy))
    assert len(pairs) > 100

    def bands(text):
        sketch = datasketch.MinHash(num_perm=BANDS * ROWS)
        sketch.update_batch({text[at : at + GRAM].encode() for at in range(len(text) - GRAM + 1)})
        return sketch.hashvalues.reshape(BANDS, ROWS)

    theirs = np.mean([(bands(one) == bands(other)).all(axis=1).any() for one, other in pairs])
    assert 0.3 < theirs < 0.95 and found(pairs) == pytest.approx(theirs, abs=0.15)
