"""Answers from logits: the best spans are those of brute force, and having no answer is weighed against them."""

import math

import numpy as np
import pytest

from tests.support.finetuning import toy_tasks
from trainers.data.tokenizer import Tokenizer
from trainers.finetuning.formats import SpanQuestion, SpanQuestions
from trainers.finetuning.samples import WindowRules, WindowSamples
from trainers.finetuning.spans import Answers, answer_all


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Three questions about paragraphs of 13, 0 and 4 tokens, in windows of 6."""
    tokenizer = Tokenizer.from_vocab(toy_tasks.vocabulary(tmp_path_factory.mktemp("vocab") / "vocab.txt"))
    contexts = [" ".join(toy_tasks.LETTERS[:13]), "", "Be do, ca"]
    questions = [SpanQuestion(f"q{n}", "who ?", n, (), False, True) for n in range(3)]
    return WindowSamples(SpanQuestions(contexts, questions), tokenizer, WindowRules(11, 3, 2))


def logits_of(samples, seed):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(len(samples), 11, 2)).astype(np.float32)


def brute_force(samples, logits, number, longest):
    """All spans of question ``number`` by score. A span is scored where its first token has most context."""
    found = {}
    rows = [row for row, window in enumerate(samples.windows) if window.question == number]
    context = samples.contexts[number]
    offsets = samples.offsets[number]
    for first in range(len(offsets)):
        seen = [(min(first - samples.windows[row].first, samples.windows[row].stop - 1 - first)
                 + 0.01 * (samples.windows[row].stop - samples.windows[row].first), -row) for row in rows
                if samples.windows[row].first <= first < samples.windows[row].stop]  # fmt: skip
        row = -max(seen)[1]
        window = samples.windows[row]
        at = samples.begin(window) - window.first
        for last in range(first, min(first + longest, window.stop)):
            score = float(logits[row, first + at, 0]) + float(logits[row, last + at, 1])
            text = context[offsets[first, 0] : offsets[last, 1]]
            found[text] = max(score, found.get(text, -math.inf))
    return sorted(found.items(), key=lambda one: -one[1]), min(float(logits[row, 0].sum()) for row in rows)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("longest", [1, 3, 30])
def test_the_best_spans_are_those_of_brute_force(samples, seed, longest):
    logits = logits_of(samples, seed)
    every = answer_all(samples, logits, 100, longest)
    assert len(every) == 3 and len({window.question for window in samples.windows}) == 3
    for number, found in enumerate(every):
        expected, null = brute_force(samples, logits, number, longest)
        assert [text for text, _ in found.best] == [text for text, _ in expected]
        assert [score for _, score in found.best] == pytest.approx([score for _, score in expected])
        assert found.null == pytest.approx(null)
    best = answer_all(samples, logits, 2, longest)
    assert all(len(found.best) <= 2 for found in best)


def test_a_paragraph_without_tokens_has_no_answer(samples):
    empty = answer_all(samples, logits_of(samples, 0), 5, 30)[1]
    assert (empty.best, empty.text, empty.odds) == ([], "", 0.0)
    assert empty.ranked(with_null=False) == []


def test_probabilities_and_odds():
    found = Answers([("a", 2.0), ("b", 1.0)], 3.0)
    assert found.text == "a" and found.odds == 1.0
    rows = found.ranked(with_null=True)
    total = math.exp(2) + math.exp(1) + math.exp(3)
    assert [row["probability"] for row in rows] == pytest.approx([math.exp(x) / total for x in (3, 2, 1)])
    assert [row["text"] for row in rows] == ["", "a", "b"]
    assert sum(row["probability"] for row in found.ranked(with_null=False)) == pytest.approx(1)
