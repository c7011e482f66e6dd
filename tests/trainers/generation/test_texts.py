"""The model's tokens as texts: what ends them, what is shown when, and that pieces add up to the whole."""

import pytest

from tplayers import GPT, GPTConfig, Sampling, generate, initialize
from trainers.data.tokenizer import Tokenizer
from trainers.generation.texts import NO_CHARACTER, StopStrings, generate_texts

WORDS = ["über cat sat on the mat. \n", "the owl über the wood. \n", "a dog ran.\n"]
HOT = Sampling(temperature=1.3)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train_bpe(WORDS, 290)


@pytest.fixture
def model(world, tokenizer):
    """A model that writes all tokens, also <|endoftext|> and parts of characters, about equally often."""
    shape = GPTConfig(2, 32, 4, tokenizer.vocab_size, 48, init_method_std=0.05, make_vocab_size_divisible_by=8)
    made = GPT(shape, world)
    initialize(made, 4)
    return made


def test_a_string_is_found_when_its_last_token_comes(tokenizer):
    for text in ("the cat. sat", "über the wood", "no such", "aü.b"):
        for strings in ((". s",), ("ü",), ("er", "cat"), ("wood", "zzzz"), (" sat on the long mat",)):
            stop, tokens = StopStrings(tokenizer, strings), tokenizer.encode(text)
            found = [n for n in range(1, len(tokens) + 1) if stop.ends(tokens[:n])]
            whole = [n for n in range(1, len(tokens) + 1) if any(s in tokenizer.decode(tokens[:n]) for s in strings)]
            assert found[:1] == whole[:1]
            expected = min((text.index(string) for string in strings if string in text), default=len(text))
            assert stop.cut(text) == text[:expected]


def test_what_is_settled_never_changes(tokenizer):
    stop = StopStrings(tokenizer, ["the end", "\n\n"])
    assert stop.settled("so the") == "so " and stop.settled("so the en") == "so "
    assert stop.settled("so then") == "so then" and stop.settled("a\n") == "a" and stop.settled("a the end b") == "a "
    assert stop.settled(f"a{NO_CHARACTER}{NO_CHARACTER}") == "a"
    nothing = StopStrings(tokenizer, [])
    assert nothing.settled("so the") == nothing.cut("so the") == "so the" and not nothing.ends([1, 2])


@pytest.mark.mpi
def test_texts_are_the_tokens_of_generate_up_to_what_ends_them(model, tokenizer):
    prompts = [tokenizer.encode("the cat"), tokenizer.encode("a")]
    free = generate(model, prompts, 60, sampling=HOT, seed=2, samples=8)
    pieces = [""] * 16
    texts = generate_texts(
        model, tokenizer, prompts, 60, sampling=HOT, seed=2, samples=8, numbers=[0, 1], stop=["e", " the"],
        show=lambda row, text: pieces.__setitem__(row, pieces[row] + text),
    )  # fmt: skip
    assert pieces == [text.text for text in texts]
    assert [(text.number, text.sample) for text in texts] == [(row // 8, row % 8) for row in range(16)]
    for text, tokens in zip(texts, free, strict=True):
        assert text.tokens == tokens[: len(text.tokens)]
        kept = text.tokens[:-1] if text.tokens[-1] == tokenizer.eod else text.tokens
        decoded = tokenizer.decode(kept)
        ends = [decoded.find(string) for string in ("e", " the") if string in decoded]
        assert text.text == decoded[: min(ends, default=None)] and "<|endoftext|>" not in text.text
        expected = "end_of_text" if len(kept) < len(text.tokens) else "stop" if text.text != decoded else "length"
        assert text.ended_by == expected and (expected != "length" or len(text.tokens) == 60)
        assert text.slid == (len(prompts[text.number]) + len(text.tokens) > 49)
    assert {text.tokens[-1] == tokenizer.eod for text in texts} == {True, False}
    assert {"end_of_text", "stop"} <= {text.ended_by for text in texts}
    assert len({text.text for text in texts}) == 16 and any(text.text for text in texts)


@pytest.mark.mpi
def test_nothing_is_generated_and_nothing_ends(model, tokenizer):
    (text,) = generate_texts(model, tokenizer, [[5]], 0, stop=["x"])
    assert (text.text, text.tokens, text.ended_by, text.slid) == ("", [], "length", False)
