"""Samples of pairs and of choices against the library's own pairs of texts."""

import numpy as np
import pytest
from tokenizers import BertWordPieceTokenizer

from tests.support.finetuning import toy_tasks
from trainers.data.tokenizer import Tokenizer
from trainers.finetuning.formats import ChoiceQuestion, Pair
from trainers.finetuning.samples import ChoiceSamples, PairSamples


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    return toy_tasks.vocabulary(tmp_path_factory.mktemp("vocab") / "vocab.txt")


@pytest.fixture(scope="module")
def tokenizer(vocab):
    return Tokenizer.from_vocab(vocab)


def library(vocab, length):
    """The library's tokenizer, which frames a pair by itself and cuts the longer text."""
    found = BertWordPieceTokenizer(str(vocab))
    found.enable_truncation(length, strategy="longest_first")
    found.enable_padding(length=length)
    return found


@pytest.mark.parametrize("length", [9, 15, 19])
def test_pairs_are_those_of_the_library(vocab, tokenizer, length):
    rng = np.random.default_rng(length)
    pairs = [Pair(str(n), *(" ".join(toy_tasks.words(rng, 0, 16)) for _ in range(2)), n % 3) for n in range(60)]
    samples = PairSamples(pairs, tokenizer, length, 3)
    assert len(samples) == 60 and samples.shape == (3,)
    cut = 0
    for number, pair in enumerate(pairs):
        expected, sample = library(vocab, length).encode(pair.first, pair.second), samples[number]
        a, b = len(pair.first.split()), len(pair.second.split())
        cut += a + b > length - 3
        assert sample.length == min(a + b + 3, length) and sample.labels == number % 3
        assert sample.length == sum(expected.attention_mask)
        if a != b:  # of two texts of one length, or with an odd room, the library cuts the other one
            assert sample.tokens.tolist() == expected.ids and sample.types.tolist() == expected.type_ids
    assert cut > 5


@pytest.mark.parametrize("length", [5, 8, 12])
@pytest.mark.parametrize("first, second", [(3, 3), (9, 2), (2, 9), (7, 6), (6, 7), (1, 12)])
def test_the_longer_text_loses_its_last_token_until_both_fit(tokenizer, first, second, length):
    """As BERT's own loop does: of equal texts, the second one."""
    a, b = ["be"] * first, ["do"] * second
    sample = PairSamples([Pair("0", " ".join(a), " ".join(b), 0)], tokenizer, length, 2)[0]
    while len(a) + len(b) > length - 3:
        (a if len(a) > len(b) else b).pop()
    words = ["[CLS]", *a, "[SEP]", *b, "[SEP]"]
    assert tokenizer.tokens(sample.tokens) == words + ["[PAD]"] * (length - len(words))


def test_choices(tokenizer):
    """The article fills what the question and the option leave; both are cut at their ends."""
    question = ChoiceQuestion("f", "be do ca fo gu " * 2, "who _ ?", ("yes", "no", "be " * 9, ""), 2)
    samples = ChoiceSamples([question], tokenizer, 14, 5)
    sample = samples[0]
    assert sample.tokens.shape == sample.types.shape == (4, 14) and samples.shape == (4,)
    article = ["be", "do", "ca", "fo", "gu"] * 2
    asked = [["who", "yes", "?"], ["who", "no", "?"], ["who", "be", "be", "be", "be"], ["who", "?"]]
    for row, words in enumerate(asked):
        text = ["[CLS]", *words, "[SEP]", *article[: 11 - len(words)], "[SEP]"]
        assert tokenizer.tokens(sample.tokens[row]) == text + ["[PAD]"] * (14 - len(text))
        assert sample.types[row].tolist() == [0] * (len(words) + 2) + [1] * (12 - len(words))
    assert sample.length.tolist() == [14] * 4 and sample.labels == 2


def test_other_texts_or_lengths_are_other_samples(tokenizer):
    pairs = [Pair("0", "be", "do", 1)]
    base = PairSamples(pairs, tokenizer, 9, 3).identity()
    assert base == PairSamples(list(pairs), tokenizer, 9, 3).identity()
    assert base != PairSamples(pairs, tokenizer, 10, 3).identity()
    assert base != PairSamples([pairs[0]._replace(label=2)], tokenizer, 9, 3).identity()
