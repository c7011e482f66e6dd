"""Masks: whole words, in runs of one to three, within one part, and never more than the budget."""

from itertools import pairwise

import numpy as np
import pytest

from trainers.data.samples import philox
from trainers.data.sentences.masking import LARGEST_RUN, budget, mask_words
from trainers.data.wordpiece import WordPieces

# Ids 5 to 99 begin a word, 100 to 199 continue one.
PIECES = WordPieces(
    pad=0, cls=2, sep=3, mask=4, continues=np.arange(200) >= 100, ordinary=np.arange(5, 200, dtype=np.int64)
)


def text(seed: int, length: int) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """[CLS] A [SEP] B [SEP] of random words, and its parts. B begins with a piece that continues a word."""
    rng = np.random.default_rng(seed)
    tokens = np.where(rng.random(length) < 0.3, rng.integers(100, 200, length), rng.integers(5, 100, length))
    middle = int(rng.integers(2, length - 3))
    tokens[0], tokens[middle], tokens[-1] = 2, 3, 3
    tokens[1] = 7
    tokens[middle + 1] = 150
    return tokens, ((1, middle), (middle + 1, length - 1))


def words(tokens: np.ndarray, parts: tuple[tuple[int, int], ...]) -> list[range]:
    """The words, found one token at a time."""
    found = []
    for begin, end in parts:
        starts = [n for n in range(begin, end) if n == begin or tokens[n] < 100]
        found += [range(*borders) for borders in pairwise([*starts, end])]
    return found


@pytest.mark.parametrize("length", [8, 40, 512])
def test_masks_are_whole_words_of_one_part_within_the_budget(length: int) -> None:
    for seed in range(60):
        tokens, parts = text(seed, length)
        count = budget(length, length - 3, 0.15)
        masks = mask_words(tokens, parts, count, PIECES, philox(seed, 1))
        assert len(masks.positions) <= count
        assert np.all(np.diff(masks.positions) > 0)  # none twice: Megatron's n-grams overlapped (its PR 196)
        assert np.array_equal(masks.labels, tokens[masks.positions])
        masked = set(masks.positions.tolist())
        for word in words(tokens, parts):
            assert len(masked & set(word)) in (0, len(word)), "a word is masked in part"
        assert not masked & {0, parts[1][0] - 1, length - 1}, "[CLS] or [SEP] is masked"
        untouched = np.setdiff1d(np.arange(length), masks.positions)
        assert np.array_equal(masks.tokens[untouched], tokens[untouched])
        assert len(masks.drawn) == len(words(tokens, parts))


def test_a_run_never_reaches_over_the_separator() -> None:
    """One word in each part, and room for both: a run of 2 would have to reach over [SEP]."""
    tokens = np.array([2, 10, 3, 20, 3])
    for seed in range(50):
        masks = mask_words(tokens, ((1, 2), (3, 4)), 1, PIECES, philox(seed))
        assert masks.drawn.tolist() == [1, 1]
        assert len(masks.positions) == 1
    # The last two words of A may be one run, and the word after them in B never belongs to it.
    tokens = np.array([2, 10, 11, 3, 20, 3])
    drawn = np.array([mask_words(tokens, ((1, 3), (4, 5)), 2, PIECES, philox(seed)).drawn for seed in range(2000)])
    assert set(drawn[:, 0]) == {1, 2} and set(drawn[:, 1]) == {1} and set(drawn[:, 2]) == {1}
    assert abs((drawn[:, 0] == 2).mean() - 1 / 3) < 0.03


def test_lengths_of_runs_and_kinds_of_masks() -> None:
    """p(n) is proportional to 1/n; each masked token becomes [MASK], stays, or becomes any ordinary token."""
    drawn, masked, kept, changed = [], 0, 0, []
    for seed in range(400):
        tokens, parts = text(seed, 512)
        masks = mask_words(tokens, parts, 76, PIECES, philox(seed, 2))
        room = np.concatenate(
            [np.arange(sum(w.start in range(*p) for w in words(tokens, parts)), 0, -1) for p in parts]
        )
        drawn.append(masks.drawn[room >= LARGEST_RUN])
        now = masks.tokens[masks.positions]
        masked += int((now == 4).sum())
        kept += int((now == masks.labels).sum())
        changed.append(now[(now != 4) & (now != masks.labels)])
    every = np.concatenate(drawn)
    for n, share in ((1, 6 / 11), (2, 3 / 11), (3, 2 / 11)):
        assert abs((every == n).mean() - share) < 0.005
    others = np.concatenate(changed)
    total = masked + kept + len(others)
    assert abs(masked / total - 0.8) < 0.01
    assert abs(kept / total - 0.1) < 0.01
    assert abs(len(others) / total - 0.1) < 0.01
    assert others.min() >= 5 and len(set(others)) == len(PIECES.ordinary)  # drawn per token, of all ordinary ones


def test_a_run_is_shortened_until_it_fits() -> None:
    tokens = np.array([2, 10, 110, 11, 111, 12, 112, 3])  # three words of two pieces
    sizes = [len(mask_words(tokens, ((1, 7),), 3, PIECES, philox(seed)).positions) for seed in range(100)]
    assert set(sizes) == {2}  # one word, whatever was drawn: two words have four pieces
    assert not len(mask_words(tokens, ((1, 7),), 1, PIECES, philox(0)).positions)  # no word fits: none is masked


def test_a_text_without_words() -> None:
    masks = mask_words(np.array([2, 3]), ((1, 1),), 3, PIECES, philox(0))
    assert not len(masks.positions) and masks.tokens.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("length", "target", "most"),
    [(512, 509, 76), (510, 509, 76), (100, 509, 15), (103, 100, 15), (5, 509, 1), (5, 2, 0)],
)
def test_budget(length: int, target: int, most: int) -> None:
    assert budget(length, target, 0.15) == most
