"""The model's tokens as texts: what ends them, what is shown when, and that pieces add up to the whole."""

import random

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers.sentencepiece import sentencepiece
from tplayers import GPT, GPTConfig, Sampling, generate, initialize
from trainers.data.tokenizer import Tokenizer
from trainers.generation.texts import NO_CHARACTER, StopStrings, generate_texts

WORDS = ["über cat sat on the mat. \n", "the owl über the wood. \n", "a dog ran.\n"]
HOT = Sampling(temperature=1.3)


@pytest.fixture(scope="module")
def byte_level():
    return Tokenizer.train_bpe(WORDS, 290)


@pytest.fixture(scope="module", params=["byte-level", "SentencePiece"])
def tokenizer(request, byte_level):
    """The second one's decoder takes a blank off the beginning of a text."""
    return byte_level if request.param == "byte-level" else Tokenizer(sentencepiece(WORDS, 60))


@pytest.fixture(scope="module")
def whole_text(tokenizer):
    """What transformers decodes a whole sequence to."""
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.to_bytes().decode()))
    return lambda tokens: theirs.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


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
            found = [n for n in range(1, len(tokens) + 1) if stop.ends([], tokens[:n])]
            whole = [n for n in range(1, len(tokens) + 1) if any(s in tokenizer.decode(tokens[:n]) for s in strings)]
            assert found[:1] == whole[:1]
            expected = min((text.index(string) for string in strings if string in text), default=len(text))
            assert stop.cut(text) == text[:expected]


def test_a_string_is_found_behind_a_prompt(tokenizer, whole_text):
    """One that begins with a blank, too, and none that begins in the prompt."""
    for prompt, text in (("the cat", "the cat sat on the mat"), ("über", "über the über"), ("a", "a 漢. 漢 dog")):
        before, tokens = tokenizer.encode(prompt), tokenizer.encode(text)
        rest = tokens[len(before) :]
        assert tokens[: len(before)] == before
        for strings in ((" sat",), (" the",), (" ü",), (" 漢",), ("cat sat",), ("r th", " on", "dog")):
            stop = StopStrings(tokenizer, strings)
            found = [n for n in range(len(rest) + 1) if stop.ends(before, rest[:n])]
            added = [whole_text([*before, *rest[:n]])[len(prompt) :] for n in range(len(rest) + 1)]
            assert found[:1] == [n for n, one in enumerate(added) if any(s in one for s in strings)][:1]


def drawn_tokens(tokenizer, draws):
    """Words, characters of several bytes, and bytes that are part of no character: the id of each token."""
    ids = tokenizer.vocabulary()
    single = [f"<0x{byte:02X}>" for byte in (*b"ab .", 0xE6, 0xBC, 0xA2, 0xC3, 0xFF)]
    single = [ids[one] for one in single if one in ids] or tokenizer.encode("漢ü")
    found = []
    for _ in range(draws.randint(1, 8)):
        text = draws.choice(["the cat", "über", " 漢", "漢字", "🙂", " ü", "a", "."])
        found += draws.choice([tokenizer.encode(text), draws.choices(single, k=draws.randint(1, 3))])
    return found


def test_a_string_is_found_behind_bytes(tokenizer):
    """SentencePiece reads a run of bytes as a whole: each is a replacement character until all are characters."""
    draws, ends = random.Random(0), 0
    for _ in range(300):
        prompt, tokens = drawn_tokens(tokenizer, draws), drawn_tokens(tokenizer, draws)
        added = [tokenizer.decode_after(prompt, tokens[:n]) for n in range(len(tokens) + 1)]
        pieces = [one for text in added for one in text.split(NO_CHARACTER) if one]
        if not pieces:
            continue
        piece = draws.choice(pieces)
        begin = draws.randrange(len(piece))
        string = piece[begin : begin + draws.randint(1, 4)]
        stop = StopStrings(tokenizer, [string])
        found = [n for n in range(len(tokens) + 1) if stop.ends(prompt, tokens[:n])]
        assert found[:1] == [n for n, text in enumerate(added) if string in text][:1], (prompt, tokens, string)
        ends += bool(found)
    assert ends > 200


def test_what_is_settled_never_changes(tokenizer):
    stop = StopStrings(tokenizer, ["the end", "\n\n"])
    assert stop.settled("so the") == "so " and stop.settled("so the en") == "so "
    assert stop.settled("so then") == "so then" and stop.settled("a\n") == "a" and stop.settled("a the end b") == "a "
    assert stop.settled(f"a{NO_CHARACTER}{NO_CHARACTER}") == "a"
    nothing = StopStrings(tokenizer, [])
    assert nothing.settled("so the") == nothing.cut("so the") == "so the" and not nothing.ends([], [1, 2])


@pytest.mark.slow
@pytest.mark.mpi
def test_texts_are_the_tokens_of_generate_up_to_what_ends_them(model, tokenizer, whole_text):
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
        prompt = whole_text(prompts[text.number])
        decoded = whole_text([*prompts[text.number], *kept])
        assert decoded.startswith(prompt)
        decoded = decoded.removeprefix(prompt)
        ends = [decoded.find(string) for string in ("e", " the") if string in decoded]
        assert text.text == decoded[: min(ends, default=None)] and tokenizer.end_token not in text.text
        expected = "end_of_text" if len(kept) < len(text.tokens) else "stop" if text.text != decoded else "length"
        assert text.ended_by == expected and (expected != "length" or len(text.tokens) == 60)
        assert text.slid == (len(prompts[text.number]) + len(text.tokens) > 49)
    assert {text.tokens[-1] == tokenizer.eod for text in texts} == {True, False}
    assert {"end_of_text", "stop"} <= {text.ended_by for text in texts}
    assert len({text.text for text in texts}) == 16 and any(text.text for text in texts)


def test_bytes_at_the_end_may_still_change(tokenizer):
    tokens = tokenizer.encode("a 漢")
    ids = tokenizer.vocabulary()
    expected = 3 if "<0xFF>" in ids else 0
    assert [tokenizer.bytes_at_end(one) for one in (tokens, [*tokens, ids["a"]], [])] == [expected, 0, 0]


def test_half_of_a_character_that_a_prompt_ends_in_is_completed(tokenizer):
    tokens = tokenizer.encode("a 漢ü")
    every = [tokenizer.decode_after(tokens[:n], tokens[n:]) for n in range(len(tokens) + 1)]
    assert set(every) <= {"a 漢ü", " 漢ü", "漢ü", "ü", ""} and {"漢ü", "ü", ""} <= set(every)


@pytest.mark.mpi
def test_nothing_is_generated_and_nothing_ends(model, tokenizer):
    (text,) = generate_texts(model, tokenizer, [[5]], 0, stop=["x"])
    assert (text.text, text.tokens, text.ended_by, text.slid) == ("", [], "length", False)
