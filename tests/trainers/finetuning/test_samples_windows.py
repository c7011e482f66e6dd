"""SQuAD's windows: every token is seen, labels name the answer, and most context is that of brute force."""

import itertools

import numpy as np
import pytest

from tests.support.data import DATA, needs
from tests.support.finetuning import toy_tasks
from trainers.data.tokenizer import Tokenizer
from trainers.finetuning.formats import SpanQuestion, SpanQuestions, read_squad
from trainers.finetuning.samples import WindowRules, WindowSamples, most_context, tokens_of, windows


@pytest.mark.parametrize("tokens", [0, 1, 5, 6, 7, 30, 101])
@pytest.mark.parametrize("room, stride", [(6, 1), (6, 3), (6, 6), (6, 50), (1, 1)])
def test_no_token_is_left_out(tokens, room, stride):
    found = windows(tokens, room, stride)
    assert found[0][0] == 0 and found[-1][1] == tokens
    assert all(0 <= stop - first <= room for first, stop in found)
    assert all(second - first == min(stride, room) for (first, _), (second, _) in itertools.pairwise(found))
    assert {token for first, stop in found for token in range(first, stop)} == set(range(tokens))


@pytest.mark.parametrize("tokens", [1, 6, 7, 30, 101])
def test_most_context_is_that_of_brute_force(tokens):
    spans = windows(tokens, 12, 5)

    def context(token, span):
        first, stop = span
        return min(token - first, stop - 1 - token) + 0.01 * (stop - first) if first <= token < stop else -1

    for token, owner in enumerate(most_context(spans, tokens)):
        scores = [context(token, span) for span in spans]
        assert scores[owner] == max(scores) and owner == scores.index(max(scores))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_vocab(toy_tasks.vocabulary(tmp_path_factory.mktemp("vocab") / "vocab.txt"))


def asked(context: str, answer: str, start: int, question: str = "who is ?") -> SpanQuestions:
    return SpanQuestions([context], [SpanQuestion("q", question, 0, ((answer, start),), False, True)])


def test_a_sample(tokenizer):
    samples = WindowSamples(asked("be do Ada king ca .", "Ada king", 6), tokenizer, WindowRules(12, 4, 8))
    ids = tokenizer.vocabulary()
    (sample,) = [samples[n] for n in range(len(samples))][:1]
    words = ["[CLS]", "who", "is", "?", "[SEP]", "be", "do", "ada", "king", "ca", ".", "[SEP]"]
    assert sample.tokens.tolist() == [ids[word] for word in words]
    assert sample.types.tolist() == [0] * 5 + [1] * 7 and sample.length == 12
    assert sample.labels.tolist() == [7, 8]


def test_windows_that_do_not_hold_the_whole_answer_point_at_cls(tokenizer):
    """Windows of 3 tokens, every 2: be do Ada | Ada king ca | ca . ."""
    samples = WindowSamples(asked("be do Ada king ca . .", "Ada king", 6), tokenizer, WindowRules(9, 2, 8))
    assert [samples[n].labels.tolist() for n in range(len(samples))] == [[0, 0], [5, 6], [0, 0]]
    assert [(one.first, one.stop) for one in samples.windows] == [(0, 3), (2, 5), (4, 7)]
    assert samples.windows[1].question == 0 and samples.begin(samples.windows[1]) == 5


def test_a_question_is_cut_and_a_text_without_tokens_has_one_window(tokenizer):
    samples = WindowSamples(asked(" ", "", 0, "who is " * 5), tokenizer, WindowRules(9, 2, 4))
    assert len(samples) == 1 and samples[0].length == 4 + 3 and samples[0].labels.tolist() == [0, 0]


def test_a_file_without_answers_has_no_labels(tokenizer):
    file = SpanQuestions(["be do"], [SpanQuestion("q", "who ?", 0, (), False, False)])
    assert WindowSamples(file, tokenizer, WindowRules(12, 4, 8))[0].labels.tolist() == [-100, -100]


def test_other_texts_rules_or_answers_are_other_samples(tokenizer):
    base = asked("be do Ada king ca", "Ada", 6), WindowRules(12, 4, 8)
    others = [(base[0], WindowRules(12, 3, 8)), (asked("be do Ada king cu", "Ada", 6), base[1]),
              (asked("be do Ada king ca", "king", 10), base[1])]  # fmt: skip
    found = [WindowSamples(file, tokenizer, rules).identity() for file, rules in (base, base, *others)]
    assert found[0] == found[1] and len(set(found)) == 4


def test_the_tokens_of_a_text():
    offsets = np.array([[0, 2], [3, 5], [5, 6], [9, 12]])
    assert tokens_of(offsets, "ab", 3) == (1, 1)
    assert tokens_of(offsets, "b.", 4) == (1, 2)  # a text that begins inside of a token
    assert tokens_of(offsets, "xx  yy", 5) == (2, 3)
    first, last = tokens_of(offsets, "   ", 6)
    assert first > last


@needs("task-samples", "bert-vocab")
@pytest.mark.parametrize("name, version", [("allennlp_squad", "1.1"), ("allennlp_squad2", "2.0")])
def test_the_labels_of_the_real_files_name_the_answers(name, version):
    file = read_squad(DATA / f"task-samples/{name}.json", version, labelled=True, located=True)
    tokenizer = Tokenizer.from_vocab(DATA / "bert-vocab/bert-base-uncased-vocab.txt")
    samples = WindowSamples(file, tokenizer, WindowRules(64, 16, 24))
    named = 0
    for number, window in enumerate(samples.windows):
        question = file.questions[window.question]
        first, last = samples[number].labels
        if first:
            place = window.first - samples.begin(window)
            offsets = samples.offsets[question.context]
            text = file.contexts[question.context][offsets[first + place, 0] : offsets[last + place, 1]]
            assert text == question.answers[0][0]
            named += 1
    assert named >= sum(bool(question.answers) for question in file.questions) > 0
