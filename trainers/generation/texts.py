"""Texts: what a model writes after prompts, with strings that end a text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tplayers import GPT, Sampling, generate
from trainers.data.tokenizer import Tokenizer

#: what a tokenizer writes for bytes that are no whole character
NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Text:
    """What a model wrote after a prompt.

    number: of the prompt. sample: of this prompt's texts, from 0. text: without the prompt, and without the string or
    the token that ended it. tokens: all that the model chose, with those. ended_by: "end_of_text" (the token
    <|endoftext|>), "stop" (a string that ends a text) or "length" (the most tokens). slid: the text got longer than the
    model's positions, so that its first tokens were forgotten.
    """

    number: int
    sample: int
    text: str
    tokens: list[int]
    ended_by: str
    slid: bool


class StopStrings:
    """Strings that end a text. tokenizer: of the tokens. strings: not empty; the text ends before the first of them."""

    def __init__(self, tokenizer: Tokenizer, strings: Collection[str]) -> None:
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        # A token has at least one byte, so a string that ends in the last token begins within so many tokens.
        self._tokens = max((len(string.encode()) for string in strings), default=0)

    def ends(self, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether one of the strings is in the text that ``tokens`` add to ``prompt``, and was not before the last."""
        if not self._strings:
            return False
        first = max(len(tokens) - self._tokens, 0)
        before = tokens[first - 1 : first] if first else prompt[-1:]  # so that the first token keeps its blank
        tail = self._tokenizer.decode_after(before, tokens[first:])
        return any(string in tail for string in self._strings)

    def cut(self, text: str) -> str:
        """``text`` before the first of the strings."""
        return text[: min((at for string in self._strings if (at := text.find(string)) >= 0), default=len(text))]

    def settled(self, text: str) -> str:
        """The part of an unfinished ``text`` that no further token changes: no half of a string or of a character."""
        text = self.cut(text).rstrip(NO_CHARACTER)
        held = max(
            (n for string in self._strings for n in range(1, len(string)) if text.endswith(string[:n])), default=0
        )
        return text[: len(text) - held]


def generate_texts(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    samples: int = 1,
    numbers: Sequence[int] | None = None,
    stop: Collection[str] = (),
    slide: int = 1,
    show: Callable[[int, str], None] | None = None,
) -> list[Text]:
    """The texts that continue prompts of tokens, ``samples`` for each prompt, all in one batch.

    A text also ends at `Tokenizer.end_token`, if the tokenizer has one. stop: strings that end a text, too. show:
    called on every rank with the number of the row and the next piece of its text, as soon as no further token can
    change this piece. No warning is given where a window slides, because `Text.slid` says it. The other arguments, the
    errors, and which ranks must call it: as for `tplayers.generate`.
    """
    strings, end = StopStrings(tokenizer, stop), _end(tokenizer)
    shown = [0] * (len(prompts) * samples)

    def text_of(row: int, tokens: Sequence[int]) -> str:
        kept = tokens[:-1] if tokens and tokens[-1] in end else tokens
        return strings.cut(tokenizer.decode_after(prompts[row // samples], kept))

    def tell(row: int, text: str) -> None:
        if show is not None and len(text) > shown[row]:
            show(row, text[shown[row] :])
            shown[row] = len(text)

    def after(row: int, tokens: Sequence[int]) -> bool:
        if show is not None:
            tell(row, strings.settled(text_of(row, tokens[: len(tokens) - tokenizer.bytes_at_end(tokens)])))
        return strings.ends(prompts[row // samples], tokens)

    found = generate(
        model, prompts, max_new_tokens, sampling=sampling, seed=seed, samples=samples, numbers=numbers,
        stop_tokens=end, after_token=after, slide=slide, warn=False,
    )  # fmt: skip
    texts = []
    for row, tokens in enumerate(found):
        prompt = row // samples
        ended_by = "length"
        if tokens and tokens[-1] in end:
            ended_by = "end_of_text"
        elif strings.ends(prompts[prompt], tokens):
            ended_by = "stop"
        # The last token is chosen, and does not go through the model.
        slid = len(prompts[prompt]) + len(tokens) - 1 > model.config.max_position_embeddings
        texts.append(
            Text(
                prompt if numbers is None else numbers[prompt], row % samples, text_of(row, tokens), tokens,
                ended_by, slid,
            )
        )  # fmt: skip
        tell(row, texts[-1].text)
    return texts


def _end(tokenizer: Tokenizer) -> list[int]:
    """The token that ends a document, if there is one."""
    return [] if tokenizer.end_token is None else [tokenizer.eod]
