"""SQuAD's measures against an implementation of their own, on random pairs and by brute force."""

import re

import numpy as np
import pytest

from trainers.finetuning.squad_metrics import best_threshold, exact_match, f1, scored, thresholded

WORDS = ["the", "a", "an", "The", "cat", "Cat", "cat's", "is", "12", "3.5", "...", "-", "U.S.", "naïve", "theatre", "'"]
VERSIONS = ["1.1", "2.0"]


def words(text):
    """The words that count, found by another way than the code's: character by character, then token by token."""
    kept = "".join(c for c in text.casefold() if not re.match(r"[!-/:-@\[-`{-~]", c))
    return [word for word in re.split(r"\s+", kept) if word and word not in ("a", "an", "the")]


def reference(prediction, answer, version):
    """(exact match, F1): words are taken away from both lists one by one."""
    ours, theirs = words(prediction), words(answer)
    left, same = list(theirs), 0
    for word in ours:
        if word in left:
            left.remove(word)
            same += 1
    if not ours and not theirs:
        return 1.0, 1.0 if version == "2.0" else 0.0
    return float(ours == theirs), 2 * same / (len(ours) + len(theirs))


def pairs():
    """1,000 pairs of texts of 0 to 5 words, some of which have no word left, and some of which are almost equal."""
    rng = np.random.default_rng(0)
    for number in range(1000):
        first = [str(word) for word in rng.choice(WORDS, rng.integers(0, 6))]
        second = list(rng.permutation(first)) if number % 3 == 0 else rng.choice(WORDS, rng.integers(0, 6))
        space = " " if number % 2 else "  "
        yield space.join(first), space.join(map(str, second))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_thousand_pairs(version):
    every = [*pairs(), ("", ""), ("the", "a"), ("", "cat"), ("cat", ""), ("...", "cat"), ("cat", "The"), ("", "an")]
    empty = [(not words(one), not words(other)) for one, other in every]
    assert {(True, True), (True, False), (False, True), (False, False)} == set(empty)
    shares = set()
    for one, other in every:
        exact, overlap = reference(one, other, version)
        assert exact_match(one, other, version) == exact, (one, other)
        assert f1(one, other, version) == pytest.approx(overlap, abs=1e-15), (one, other)
        shares.add(overlap)
    assert len(shares) > 10


@pytest.mark.parametrize(
    "version, prediction, answer, exact, overlap",
    [
        ("1.1", "the", "an", 1.0, 0.0),  # evaluate-v1.1.py: no common word
        ("2.0", "the", "an", 1.0, 1.0),  # evaluate-v2.0.py: neither has a word
        ("2.0", "", "cat", 0.0, 0.0),
        ("2.0", "the black cat", "black cat!", 1.0, 1.0),
        ("2.0", "cat cat", "cat", 0.0, 2 / 3),
        ("2.0", "ante the—end", "ante —end", 1.0, 1.0),  # a dash that is not ASCII stays, and ends the article
    ],
)
def test_known_pairs(version, prediction, answer, exact, overlap):
    assert exact_match(prediction, answer, version) == exact
    assert f1(prediction, answer, version) == pytest.approx(overlap)


def test_the_best_of_several_answers_counts():
    assert scored(f1, "black cat", ["dog", "black dog", "a black cat"], "1.1") == 1.0
    assert scored(f1, "black cat", ["dog", "black dog"], "1.1") == pytest.approx(0.5)
    assert scored(exact_match, "", [], "2.0") == 1.0
    assert scored(exact_match, "", ["the"], "2.0") == 1.0  # an answer without a word is none
    assert scored(exact_match, "", ["the", "cat"], "2.0") == 0.0
    assert scored(exact_match, "", [], "1.1") == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_the_best_threshold_is_that_of_brute_force(seed):
    rng = np.random.default_rng(seed)
    answerable, said, odds = rng.random(9) < 0.6, rng.random(9) < 0.5, rng.permutation(9) - 4.5
    scores = np.where(answerable, rng.random(9), ~said)
    tried = {at: thresholded(scores, odds, answerable, at).mean() for at in [-100.0, *odds.tolist()]}
    best, at = best_threshold(said, scores, odds, answerable)
    assert best == pytest.approx(max(tried.values()))
    assert at == 0.0 or tried[at] == pytest.approx(best)
    if at == 0.0:  # no threshold is better than leaving all questions unanswered
        assert best == pytest.approx(tried[-100.0])


def test_questions_above_the_threshold_count_as_unanswered():
    scores, has, odds = np.array([0.5, 0.0, 1.0]), np.array([True, False, True]), np.array([-1.0, 2.0, 1.0])
    assert thresholded(scores, odds, has, 0.0).tolist() == [0.5, 1.0, 0.0]
    assert thresholded(scores, odds, has, 1.0).tolist() == [0.5, 1.0, 1.0]
    assert thresholded(scores, odds, has, 2.0).tolist() == scores.tolist()
