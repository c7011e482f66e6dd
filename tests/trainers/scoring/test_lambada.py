"""LAMBADA's examples: hand-made rows for both definitions, both formats, and what is refused."""

import json

import numpy as np
import pytest

from tests.support.tokenizers.sentencepiece import sentencepiece
from trainers.data import text_files
from trainers.data.tokenizer import Tokenizer
from trainers.scoring import lambada


@pytest.fixture(scope="module")
def tokenizer():
    """Whole words after a space are one token where they are frequent, others are several."""
    return Tokenizer.train_bpe(["said the old man to the dog " * 50], 290)


def examples(tokenizer, texts, length=64):
    where = [f"line {n}" for n in range(1, len(texts) + 1)]
    rows = lambada.encoded(list(zip(where, texts, strict=True)), tokenizer, length)
    return lambada.examples(rows, length)


def test_a_newline_is_part_of_the_context_of_the_last_token_alone(tokenizer):
    """Strict: a space and the word follow the context, which ends in its last character that is not white space."""
    (one,) = examples(tokenizer, [" said the man \n to the\ndog \n"])
    assert tokenizer.decode(one.strict.tokens.tolist()) == "said the man \n to the dog"
    assert tokenizer.decode(one.last.tokens.tolist()) == " said the man \n to the\ndog"
    assert one.strict.scored == 1 and tokenizer.tokens(one.strict.tokens[-1:].tolist()) == ["Ġdog"]
    assert one.last.scored == 1 and tokenizer.tokens(one.last.tokens[-1:].tolist()) != ["Ġdog"] and not one.cut
    passages, numbers = lambada.distinct([one])
    assert len(passages) == 2 and numbers == [(0, 1)]


def test_a_word_of_several_tokens(tokenizer):
    """Strict wants all of them, the other definition the last; both from one pass, since the tokens are the same."""
    (one,) = examples(tokenizer, ["the old man said zebra."])
    word = tokenizer.encode(" zebra.")
    assert len(word) > 3 and one.strict.tokens[-len(word) :].tolist() == word
    assert one.strict.scored == len(word) and one.last.scored == 1
    assert np.array_equal(one.strict.tokens, one.last.tokens)
    passages, numbers = lambada.distinct([one, one])
    assert len(passages) == 2 and numbers == [(0, 0), (1, 1)]


@pytest.mark.parametrize("vocab_size", [30, 120])
def test_the_word_has_the_tokens_that_it_has_in_the_text(vocab_size):
    """SentencePiece's tokenizers put a blank before each text, also before a word that is encoded apart."""
    found = Tokenizer(sentencepiece(["said the old man to the dog " * 50], vocab_size))
    for text in ("the old man said dog", "the old zebra", "a 漢 é漢"):
        (one,) = examples(found, [text])
        whole = found.encode(text)
        assert one.strict.tokens.tolist() == whole and np.array_equal(one.last.tokens, whole)
        word = found.encode(text)[-one.strict.scored :]
        assert found.decode_after(whole[: -len(word)], word) == f" {text.split()[-1]}"


def test_a_context_that_is_too_long_loses_its_beginning(tokenizer):
    text = "the man said to the dog to the man to the old dog"
    whole, word = tokenizer.encode(text), tokenizer.encode(" dog")
    for length in (3, 5, len(whole) - 1):
        (one,) = examples(tokenizer, [text], length)
        assert one.cut == (len(whole) > length + 1)
        assert one.strict.tokens.tolist() == whole[-length - 1 :] == one.last.tokens.tolist()
        assert one.strict.scored == len(word) == 1
    long = "the man said zebrazebra"
    room = len(tokenizer.encode(" zebrazebra"))
    (one,) = examples(tokenizer, [long], room)
    assert one.cut and len(one.strict.tokens) == room + 1 and one.strict.scored == room
    with pytest.raises(ValueError, match=f"line 1: its last word has {room} tokens, and the model reads {room - 1}"):
        examples(tokenizer, [long], room - 1)


def test_both_formats(tmp_path, tokenizer):
    texts = ["the old man", "to the\ndog", "é the  dog"]
    lines, plain = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines.write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n\n")
    plain.write_text("\n".join(text.replace("\n", " ") for text in texts) + "\r\n \n", encoding="utf-8")
    assert [text for _, text in text_files.read_lines(str(lines), "text")] == texts
    found = list(text_files.read_lines(str(plain), "text"))
    assert [text.strip() for _, text in found] == ["the old man", "to the dog", "é the  dog"]
    assert len(lambada.encoded(found, tokenizer, 64)) == 3


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"text": "a b"}\n{"words": "a b"}\n', "a.jsonl: line 2: no key 'text'; the keys are 'words'"),
        ("a.jsonl", '{"text": 3}\n', "a.jsonl: line 1: 'text' is int, not text"),
        ("a.jsonl", "a b\n", "a.jsonl: line 1: not JSON"),
        ("a.jsonl", '{"text": "a b"}\n{"text": " "}\n', "a.jsonl: line 2: want a text and its last word, got ''"),
        ("a.txt", "a b\n\nword \n", "a.txt: line 3: want a text and its last word, got 'word'"),
        ("a.txt", b"a b\n\xff\xfe c\n", "a.txt: line 2: not UTF-8 text"),
        ("a.txt", None, "a.txt: is a folder"),
    ],
)
def test_what_is_no_example_is_named_with_its_line(tmp_path, tokenizer, name, content, said):
    path = tmp_path / name
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=said):
        lambada.encoded(list(text_files.read_lines(str(path), "text")), tokenizer, 64)


def test_predictions_are_a_row_for_each_example(tmp_path):
    lambada.save_predictions(tmp_path / "p.jsonl", [{"target": [1], "target_text": " é"}, {"target": []}])
    assert [json.loads(line) for line in (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()] == [
        {"target": [1], "target_text": " é"}, {"target": []},
    ]  # fmt: skip
