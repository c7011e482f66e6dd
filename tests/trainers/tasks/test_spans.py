"""Span corruption: the counts of T5's formula, and that input and target give the text back."""

import numpy as np
import pytest

from trainers.data.samples import IGNORED, ZipfSamples
from trainers.tasks.spans import SpanRules, SpanSamples

#: the first sentinel, far above the tokens of the text; the end; what fills up
SENTINEL, END, FILL = 999, 1, 0


def rules(seq_length=512, decoder_seq_length=114, density=0.15, mean=3.0, seed=5):
    return SpanRules(seq_length, decoder_seq_length, density, mean, END, SENTINEL, FILL, seed)


def text_of(given, target):
    """The text of an input and its target: each sentinel of the input stands for what follows it in the target."""
    assert given[-1] == target[-1] == END
    spans, found = {}, []
    for token in target[:-1]:
        if token > SENTINEL - 200:
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    for token in given[:-1]:
        found += spans.pop(token) if token in spans else [token]
    assert not spans
    return found


def test_a_thousand_samples():
    made = rules()
    assert made.text == 568 and made.lengths(568) == (512, 114)
    inner = ZipfSamples(700, made.text, 3, 1000)
    samples, lengths, firsts = SpanSamples(inner, made), [], []
    for n in range(1000):
        sample = samples[n]
        target = sample.labels[sample.labels != IGNORED]
        assert sample.length == 512 and len(target) == 114
        sentinels = [token for token in sample.tokens if token > SENTINEL - 200]
        assert sentinels == list(range(SENTINEL, SENTINEL - 28, -1))  # round(85 / 3) spans of 85 tokens
        assert len(target) - 1 - len(sentinels) == 85 and target[0] == SENTINEL
        assert text_of(sample.tokens, target) == inner[n][:-1].tolist()
        borders = np.flatnonzero(target > SENTINEL - 200)
        lengths += np.diff(np.append(borders, len(target) - 1)).tolist()
        firsts.append(int(np.argmax(sample.tokens == SENTINEL)))
    assert np.mean(lengths) - 1 == pytest.approx(85 / 28) and min(lengths) == 2
    assert min(firsts) >= 1 and 14 < np.mean(firsts) < 21  # text comes first, 483 / 28 tokens of it


@pytest.mark.parametrize("density", [0.01, 0.15, 0.5, 0.9])
@pytest.mark.parametrize("mean", [1.0, 3.0, 20.0])
@pytest.mark.parametrize("seq_length, decoder_seq_length", [(8, 8), (64, 16), (16, 64)])
def test_other_rules_fill_what_they_may(density, mean, seq_length, decoder_seq_length):
    made = rules(seq_length, decoder_seq_length, density, mean)
    assert made.text >= 2
    given, target = made.lengths(made.text)
    assert given <= seq_length and target <= decoder_seq_length
    more = made.lengths(made.text + 1)
    assert more[0] > seq_length or more[1] > decoder_seq_length
    sample = SpanSamples(ZipfSamples(700, made.text, 3, 4), made)[3]
    assert sample.length == given and (sample.tokens[given:] == FILL).all()
    found = sample.labels[sample.labels != IGNORED]
    assert len(found) == target and len(sample.labels) == decoder_seq_length
    assert len(text_of(sample.tokens[:given], found)) == made.text


def test_a_sample_is_a_function_of_seed_epoch_and_index():
    inner = ZipfSamples(700, rules().text, 3, 10)
    samples, again, other = (SpanSamples(inner, rules(seed=seed)) for seed in (5, 5, 6))
    drawn = [samples.draw(epoch, n) for epoch in (0, 1) for n in (0, 1)]
    for one, number in zip(drawn, ((0, 0), (0, 1), (1, 0), (1, 1)), strict=True):
        assert all(map(np.array_equal, one, again.draw(*number)))
        assert not np.array_equal(one.tokens, other.draw(*number).tokens)
    assert not np.array_equal(drawn[0].tokens, drawn[2].tokens)
    assert text_of(drawn[0].tokens, drawn[0].labels) == text_of(drawn[2].tokens, drawn[2].labels)
    with pytest.raises(IndexError):
        samples[10]
