"""Texts: prompts as tokens that fit into a model, and what it writes after them, with strings that end a text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from commengine import Communicator, ProcessGrid, UsageError
from commengine.rank_zero import gather_json, on_every_rank
from tplayers import GPT, T5, Sampling, generate
from trainers.data import text_files
from trainers.data.tokenizer import UNTIDY, Tokenizer

#: the key of a prompt in a file of JSON lines
KEY = "prompt"
#: what a tokenizer writes for bytes that are no whole character
NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Prompt(NamedTuple):
    """A text that a model continues, and a T5 reads. where: the option, or the file and the line, that it came from."""

    where: str
    text: str


def read_prompts(path: str) -> list[Prompt]:
    """The prompts of a file, at least one.

    A file whose name ends in .jsonl or .json has an object with text under "prompt" in each line; any other file has
    one prompt in each line. Blank lines are left out. Raises ValueError that names the file, and the line if one is at
    fault, and OSError.
    """
    found = [Prompt(where, text) for where, text in text_files.read_lines(path, KEY)]
    if not found:
        raise ValueError(f"{path}: holds no prompt; want one in each line")
    return found


def encoded(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, positions: int, ends: Sequence[int] = ()
) -> list[list[int]]:
    """The tokens of each prompt, with those that the tokenizer puts around a text, such as <s>.

    ends: a prompt must end in one of these tokens; where it does not, it gets the first. Raises UsageError for a prompt
    without a token, or with more than ``positions``.
    """
    found = []
    for prompt in prompts:
        tokens = tokenizer.encode_around(prompt.text)
        if not tokens:
            raise UsageError(f"{prompt.where}: holds no token; a prompt has at least one")
        if len(tokens) > positions:
            raise UsageError(
                f"{prompt.where}: has {len(tokens)} tokens; the model knows {positions} positions, and a prompt has "
                "at most one token for each"
            )
        if ends and tokens[-1] not in ends:
            tokens.append(ends[0])
        found.append(tokens)
    return found


@dataclass(frozen=True)
class Text:
    """What a model wrote after a prompt.

    number: of the prompt. sample: of this prompt's texts, from 0. text: without the prompt, and without the string or
    the token that ended it. tokens: all that the model chose, with those. ended_by: "end_of_text" (a token
    that ends a text), "stop" (a string that ends a text) or "length" (the most tokens). slid: the text got longer than
    the model's positions, so that its first tokens were forgotten.
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
        before = [*prompt, *tokens[:first]]
        # Of the earlier ones those that the text of the next one may depend on: a run of bytes is read as a whole, a
        # character has at most four of them, and only the first token of all loses its blank.
        before = before[-4 - self._tokenizer.bytes_at_end(before) :]
        tail = self._tokenizer.decode_after(before, tokens[first:])
        return any(string in tail for string in self._strings)

    def cut(self, text: str) -> str:
        """``text`` before the first of the strings."""
        return text[: min((at for string in self._strings if (at := text.find(string)) >= 0), default=len(text))]

    def settled(self, text: str) -> str:
        """The part of an unfinished ``text`` that no further token changes: no half of a string or of a character."""
        text = self.cut(text).rstrip(NO_CHARACTER)
        strings = [*self._strings, *(untidy for untidy, _ in UNTIDY)] if self._tokenizer.tidies else self._strings
        held = max((n for string in strings for n in range(1, len(string)) if text.endswith(string[:n])), default=0)
        return text[: len(text) - held]


def generate_texts(
    model: GPT | T5,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    samples: int = 1,
    numbers: Sequence[int] | None = None,
    stop: Collection[str] = (),
    ends: Collection[int] | None = None,
    slide: int = 1,
    show: Callable[[int, str], None] | None = None,
    pipeline: Communicator | None = None,
) -> list[Text]:
    """The texts that continue prompts of tokens, ``samples`` for each prompt, all in one batch.

    A T5 continues nothing: its texts are those that it writes after reading the prompts.

    ends: tokens at which a text ends; None for `Tokenizer.eod`, if there is one. stop: strings that end a text, too.
    show: called on every rank with the number of the row and the next piece of its text, as soon as no further token
    can change this piece. No warning is given where a window slides, because `Text.slid` says it. The other arguments,
    the errors, and which ranks must call it: as for `tplayers.generate`.
    """
    strings = StopStrings(tokenizer, stop)
    continued = [()] * len(prompts) if isinstance(model, T5) else prompts
    if ends is None:
        ends = [] if tokenizer.end_token is None else [tokenizer.eod]
    shown = [0] * (len(prompts) * samples)

    def text_of(row: int, tokens: Sequence[int]) -> str:
        kept = tokens[:-1] if tokens and tokens[-1] in ends else tokens
        return strings.cut(tokenizer.decode_after(continued[row // samples], kept))

    def tell(row: int, text: str) -> None:
        if show is not None and len(text) > shown[row]:
            show(row, text[shown[row] :])
            shown[row] = len(text)

    def after(row: int, tokens: Sequence[int]) -> bool:
        if show is not None:
            tell(row, strings.settled(text_of(row, tokens[: len(tokens) - tokenizer.bytes_at_end(tokens)])))
        return strings.ends(continued[row // samples], tokens)

    found = generate(
        model, prompts, max_new_tokens, sampling=sampling, seed=seed, samples=samples, numbers=numbers,
        stop_tokens=ends, after_token=after, slide=slide, warn=False, pipeline=pipeline,
    )  # fmt: skip
    texts = []
    for row, tokens in enumerate(found):
        prompt = row // samples
        ended_by = "length"
        if tokens and tokens[-1] in ends:
            ended_by = "end_of_text"
        elif strings.ends(continued[prompt], tokens):
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


def in_rounds(
    grid: ProcessGrid, batches: Sequence[Sequence[int]], work: Callable[[Sequence[int]], list[Any]]
) -> Iterator[list[Any]]:
    """What ``work`` gives for the batches, on rank 0; other ranks get nothing. Collective over the grid's world.

    In each round each data rank has one batch, so that no rank waits longer than for a batch. work: gives a list that
    is representable in JSON. Its errors are raised on all ranks.
    """
    for first in range(0, len(batches), grid.data.size):
        mine: Sequence[int] = [*batches[first : first + grid.data.size], *[()] * grid.data.size][grid.data.rank]
        # An error is the same on all ranks of a tensor group, and reaches those of the other groups.
        found = on_every_rank(grid.world, lambda mine=mine: work(mine) if mine else [])  # type: ignore[misc]
        gathered = gather_json(grid.world, [] if grid.tensor.rank or grid.pipeline.rank else found)
        yield [one for of_rank in gathered for one in of_rank]
