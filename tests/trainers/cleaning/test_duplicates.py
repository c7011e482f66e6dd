"""Near-duplicates are dropped by the greedy rule, exactly, whatever the ranks and the buckets."""

import random

import numpy as np
import pytest

from tests.support.corpora import altered, greedy, in_order, paragraphs, similarities, with_copies
from trainers.cleaning.duplicates import NearDuplicates
from trainers.cleaning.exchange import Numbering, exchange, reduced
from trainers.cleaning.grams import band_keys

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


def resolve(world, texts, keys, buffer=1 << 16, threshold=0.7):
    """What `NearDuplicates` finds in ``texts``, of which each rank holds a stretch, and ``keys`` [texts, bands].

    Returns the kept ones that dropped ones are similar to, the similarities, how often it compared, and how many pairs
    were similar.
    """
    starts = [len(texts) * rank // world.size for rank in range(world.size + 1)]
    begin, end = starts[world.rank : world.rank + 2]
    documents = Numbering(world, end - begin)
    assert documents.first == begin
    sizes = np.array([len(text) for text in texts[begin:end]], np.int64)

    def lookup(numbers):
        assert sum(len(texts[n]) for n in numbers) <= buffer or len(numbers) == 2
        return [texts[n] for n in numbers]

    found = NearDuplicates(world, documents, lookup, sizes, threshold, buffer)
    for band in range(keys.shape[1]):
        found.add_band(keys[begin:end, band].astype(np.uint64), np.arange(begin, end))
    compared = []
    found.find(compared.append)
    assert sum(compared) == found.histogram.sum()

    def whole(mine):
        return np.concatenate(exchange(world, [mine] * world.size))

    counts = reduced(world, sum(compared)), reduced(world, found.similar)
    return whole(found.kept_one), whole(found.similarity), counts


@pytest.fixture(scope="module")
def chains():
    """Families in which each is like the one before it, and not like the first: order decides what is kept."""
    rng = random.Random(4)
    texts = []
    for text in paragraphs(12, words=60, seed=5):
        for _ in range(12):
            texts.append(text)
            text = altered(text, 0.06, rng)
    texts = in_order(texts)
    return texts, similarities(texts)


@pytest.mark.sizes(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("buckets", ["one", "some", "many"])
def test_the_greedy_rule_is_exact(world, chains, buckets):
    texts, values = chains
    similar = values >= 0.7
    if buckets == "one":  # all documents are candidates of each other
        keys = np.zeros((len(texts), 1))
    elif buckets == "some":  # the connected families, of which none is small, and some of nearly all documents
        groups = np.arange(len(texts))
        for _ in texts:
            groups = np.array([groups[row].min() for row in similar])
        keys = np.stack((groups, np.arange(len(texts)) % 7 == 0), axis=1)
    else:  # for each document, those like it
        numbers = np.arange(len(texts))
        keys = np.where(similar, numbers, 1000 + numbers[:, None])
    kept_one, value, (compared, found) = resolve(world, texts, keys)
    kept = greedy(similar)
    assert np.nonzero(kept_one < 0)[0].tolist() == kept and len(kept) < 0.7 * len(texts)
    for row in np.nonzero(kept_one >= 0)[0]:
        assert kept_one[kept_one[row]] == -1 and kept_one[row] < row and similar[row, kept_one[row]]
        assert value[row] == pytest.approx(values[row, kept_one[row]])
    assert found <= compared and found >= (kept_one >= 0).sum()


@pytest.mark.sizes(1, 2)
def test_a_large_cluster_takes_a_comparison_for_each_document(world):
    rng = random.Random(7)
    (text,) = paragraphs(1, words=60)
    texts = in_order(altered(text, 0.02, rng) for _ in range(600))
    assert len(texts) > 400
    keys = np.zeros((len(texts), 25))
    kept_one, _, (compared, _) = resolve(world, texts, keys)
    assert np.nonzero(kept_one < 0)[0].tolist() == greedy(similarities(texts) >= 0.7)
    assert compared < 5 * len(texts)  # all pairs would be 200 for each


@pytest.mark.sizes(1, 2)
def test_sketches_find_the_pairs(world):
    texts = in_order(with_copies(120, seed=9))
    values = similarities(texts)
    kept_one, _, (compared, found) = resolve(world, texts, band_keys(texts), buffer=3000)
    pairs = int(np.triu(values >= 0.7, 1).sum())
    assert pairs >= found > 0.9 * (kept_one >= 0).sum() > 30 and compared < 2 * pairs + 50
    assert np.nonzero(kept_one < 0)[0].tolist() == greedy(values >= 0.7)


def test_nothing_to_compare(world):
    kept_one, _, (compared, _) = resolve(world, ["a", "b", "c"], np.arange(3).reshape(3, 1))
    assert (kept_one == -1).all() and compared == 0
    kept_one, *_ = resolve(world, [], np.empty((0, 2)))
    assert len(kept_one) == 0
