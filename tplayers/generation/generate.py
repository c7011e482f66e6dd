"""generate: tokens that continue prompts, with a key-value cache, on the ranks of a tensor group."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from commengine import Communicator
from tplayers.attention.key_value_cache import KeyValueCache
from tplayers.host_copy import integers, to_device
from tplayers.models.gpt import GPT
from tplayers.models.t5 import T5
from tplayers.rng import stable_hash

from .choice import TokenChooser
from .encoded import EncodedPrompts
from .fast_weights import OutputScreen, fast_model, inference_copy, screened
from .sampling import Sampling
from .staged import StagedModel


def generate(
    model: GPT | T5,
    tokens: Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    samples: int = 1,
    numbers: Sequence[int] | None = None,
    stop_tokens: Collection[int] = (),
    after_token: Callable[[int, Sequence[int]], bool] | None = None,
    slide: int = 1,
    warn: bool = True,
    pipeline: Communicator | None = None,
) -> list[list[int]]:
    """The tokens that continue each prompt: ``samples`` rows for the first prompt, then those for the second, ...

    A T5 reads the prompts with its encoder, and its decoder writes the tokens, after ``decoder_start_token_id``.

    tokens: the prompts, of at least one token each; they may differ in length. A tensor is int64 [b, s].
    max_new_tokens: the most tokens that a row gets. sampling: None for greedy decoding. seed: with a prompt's number,
    the sample's and the token's, it decides what is drawn. numbers: of the prompts; None for 0, 1, 2 and so on. A
    prompt of the same number and seed is continued by the same text at every tensor size, and whichever other prompts
    are there.
    stop_tokens: a row ends after one of these, which is its last token.
    after_token: called after each new token with the number of the row and the row's new tokens so far; True ends the
    row. It must return the same on all ranks, and may show the text on one of them.
    slide: If a row gets longer than ``max_position_embeddings``, its first tokens are forgotten, so many at a time.
    Every token that is left then has a new position and goes through the model again: with 1, each new token takes as
    long as the whole window. Of a prompt that is longer itself, the model sees the last ``max_position_embeddings``
    tokens. warn: rank 0 of the group then gives a UserWarning at the end, which says how many rows slid.
    pipeline: the stages that have the model's layers, of which ``model`` is one; None if it is whole, as a T5 must be.

    Collective over the model's tensor group and the pipeline, with equal arguments on all ranks: if they differ, all
    ranks raise CollectiveMismatch. On the host in float32 it may make copies of the weights, which frozen models keep
    (`fast_weights`). Raises TypeError for a prompt that is no sequence of integers, and ValueError for an argument out
    of its range and where the model's logits are not finite; on all ranks. The model does not change, and no gradient
    is kept.
    """
    sampling = Sampling(temperature=0) if sampling is None else sampling
    rows_of = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    problem: TypeError | None = None
    prompts: list[list[int]] = []
    known: list[int] = []
    try:
        prompts = [_prompt(number, prompt) for number, prompt in enumerate(rows_of)]
        known = list(range(len(prompts))) if numbers is None else [index(number) for number in numbers]
    except TypeError as error:  # perhaps on this rank alone: the others must not wait for it
        problem = error
    stops = frozenset(stop_tokens)
    stages = pipeline if pipeline is not None and pipeline.size > 1 else None
    for group in (model.comm, *([] if stages is None else [stages])):
        if group.size == 1:
            continue
        asked = (prompts, max_new_tokens, sampling, seed, samples, known, sorted(stops), slide)
        digest = hashlib.blake2b(repr(asked).encode(), digest_size=8).hexdigest()
        words = f"generate({len(prompts)} prompts, {max_new_tokens} new tokens, arguments {digest})"
        group.compare(words if problem is None else str(problem))
    if problem is not None:
        raise problem
    _require(model, prompts, max_new_tokens, samples, known, slide)
    begins = [[model.config.decoder_start_token_id] for _ in prompts] if isinstance(model, T5) else prompts
    rows = [
        _Row(place * samples + sample, known[place], sample, prompt)
        for place, prompt in enumerate(begins)
        for sample in range(samples)
    ]
    columns = model.config.padded_vocab_size // model.comm.size
    chooser = TokenChooser(model.comm, model.config.vocab_size, columns, sampling, model.device)
    with torch.inference_mode(), model.without_context():
        fast: Any
        if stages is not None and isinstance(model, GPT):
            fast, screen = StagedModel(inference_copy(model), stages), None
        else:
            fast, screen = fast_model(model, len(rows), max_new_tokens, sampling, chooser.real)
            if isinstance(model, T5) and rows:
                fast = EncodedPrompts(fast, prompts)
        steps = _steps(fast, rows, max_new_tokens, chooser, screen, seed, slide)
        for step, chosen in enumerate(steps):
            for row, token in chosen:
                row.new.append(token)
                told = after_token is not None and after_token(row.place, row.new)
                row.ended = told or token in stops or step + 1 == max_new_tokens
    slid = sum(row.start > 0 for row in rows)
    if warn and slid and model.comm.rank == 0:  # at the end: a warning may be an error, and the other ranks go on
        positions = model.config.max_position_embeddings
        warnings.warn(
            f"generate: {slid} of {len(rows)} rows got longer than the {positions} positions of the model, which did "
            f"not see their first tokens any more (forgotten {slide} at a time; warn=False leaves this warning out)",
            stacklevel=2,
        )
    return [row.new for row in rows]


def _prompt(number: int, tokens: Sequence[int]) -> list[int]:
    """The tokens of a prompt. Raises TypeError that names it."""
    if not isinstance(tokens, Iterable):
        raise TypeError(
            f"generate: prompt {number} is {tokens!r:.40}, not a sequence of tokens; tokens is a list of prompts: "
            "[[1, 2, 3]] for one prompt of three tokens"
        )
    try:
        return [index(token) for token in tokens]
    except TypeError as error:
        raise TypeError(f"generate: prompt {number}: a token is an integer: {error}") from None


class _Row:
    """One text: its prompt, the tokens that it got, and the first of its tokens that the model still sees."""

    def __init__(self, place: int, number: int, sample: int, prompt: Sequence[int]) -> None:
        self.place, self.number, self.sample, self.prompt = place, number, sample, prompt
        self.new: list[int] = []
        self.start = 0
        self.ended = False

    def window(self) -> list[int]:
        """The tokens that the model sees."""
        return [*self.prompt, *self.new][self.start :]

    def slid(self, positions: int, slide: int) -> bool:
        """Forget tokens if there are more than ``positions``, and return whether any were."""
        length = len(self.prompt) + len(self.new)
        if length - self.start <= positions:
            return False
        self.start = length - positions if not self.new else length - positions + slide - 1
        return True


def _steps(
    model: Any, rows: Sequence[_Row], count: int, chooser: TokenChooser, screen: OutputScreen | None,
    seed: int, slide: int,
) -> Iterator[list[tuple[_Row, int]]]:  # fmt: skip
    """The next token of each row that has not ended, step by step. The caller appends it, and ends rows."""
    positions, device, sampling = model.config.max_position_embeddings, chooser.device, chooser.sampling
    seen = _Seen(rows, chooser) if sampling.repetition_penalty != 1 else None
    active, cache = list(rows), None
    for step in range(count if rows else 0):
        slid = [row.slid(positions, slide) for row in active]
        if cache is None:
            longest = max(len(row.prompt) - row.start for row in active)
            cache, hidden = _first_pass(model, active, min(positions, longest + count - 1))
        elif any(slid):
            cache.clear()
            hidden = _whole_windows(model, cache, active)
        else:
            last = integers([[row.new[-1]] for row in active], device)
            hidden = model.hidden_states(last, cache=cache)[0]
            cache.advance([1] * len(active))
        logits = None if screen is None else screen.logits(hidden, screened(sampling))
        if logits is None:
            logits = model.logits(hidden)
        keys = None
        if sampling.temperature > 0:
            keys = integers([stable_hash("next token", seed, row.number, row.sample, step) for row in active], device)
        tokens, scores = chooser.choose(logits, keys, None if seen is None else seen.of)
        chosen = tokens.tolist()
        if not all(map(math.isfinite, scores.tolist())):
            raise ValueError(
                f"generate: the logits of token {step} after the prompt are not finite: the model's weights, or sums "
                "of them in its dtype, are not"
            )
        yield list(zip(active, chosen, strict=True))
        kept = [place for place, row in enumerate(active) if not row.ended]
        if not kept:
            return
        if seen is not None:
            seen.add(chosen)
        if len(kept) < len(active):
            active = [active[place] for place in kept]
            cache.keep(kept)
            if seen is not None:
                seen.of = seen.of[kept]


def _first_pass(model: Any, rows: Sequence[_Row], capacity: int) -> tuple[KeyValueCache, Tensor]:
    """A cache of the rows' prompts, and the last token's hidden state of each [b, h]. Samples share one pass."""
    prompts = {id(row.prompt): row for row in rows}
    place = {prompt: number for number, prompt in enumerate(prompts)}
    cache = model.new_cache(len(prompts), capacity)
    hidden = _whole_windows(model, cache, list(prompts.values()))
    if len(prompts) < len(rows):
        of_rows = [place[id(row.prompt)] for row in rows]
        cache.keep(of_rows)
        hidden = hidden[integers(of_rows, hidden.device)]
    return cache, hidden


def _whole_windows(model: Any, cache: KeyValueCache, rows: Sequence[_Row]) -> Tensor:
    """Fill the empty ``cache`` with the windows of the rows; the hidden state of each row's last token [b, h]."""
    windows = [row.window() for row in rows]
    lengths = [len(window) for window in windows]
    longest, device = max(lengths), model.device
    # Shorter rows are filled up at the end, which no real token sees.
    filled = integers([window + [0] * (longest - len(window)) for window in windows], device)
    hidden = model.hidden_states(filled, cache=cache)
    cache.advance(lengths)
    last = integers([length - 1 for length in lengths], device)
    found: Tensor = hidden[last, torch.arange(len(rows), dtype=torch.int64, device=device)]
    return found


class _Seen:
    """Which of this rank's tokens each row holds: bool [b, columns]."""

    def __init__(self, rows: Sequence[_Row], chooser: TokenChooser) -> None:
        self._first, self._real = chooser.first, chooser.real
        of = torch.zeros((len(rows), chooser.columns), dtype=torch.bool, device="cpu")
        for number, row in enumerate(rows):
            mine = integers(row.prompt) - self._first
            of[number, mine[(mine >= 0) & (mine < self._real)]] = True
        self.of = to_device(of, chooser.device)

    def add(self, tokens: Sequence[int]) -> None:
        """Add the next token of each row."""
        for number, token in enumerate(tokens):
            if 0 <= token - self._first < self._real:
                self.of[number, token - self._first] = True


def _require(
    model: GPT | T5, prompts: Sequence[Sequence[int]], count: int, samples: int, numbers: Sequence[int], slide: int
) -> None:
    """Raise ValueError that names the argument at fault."""
    if not model.causal:
        raise ValueError(f"generate: {type(model).__name__} is not causal; it needs a GPT or a T5")
    if isinstance(model, T5) and not (model.part.first and model.part.last):
        raise ValueError("generate: a T5 in pipeline stages generates no text: load it with one stage")
    positions, vocab_size = model.config.max_position_embeddings, model.config.vocab_size
    if count < 0:
        raise ValueError(f"generate: max_new_tokens={count} must not be negative")
    if samples < 1:
        raise ValueError(f"generate: samples={samples} must be at least 1")
    if not 1 <= slide <= positions:
        raise ValueError(f"generate: slide={slide} must be from 1 to max_position_embeddings={positions}")
    if len(numbers) != len(prompts):
        raise ValueError(f"generate: {len(numbers)} numbers for {len(prompts)} prompts")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"generate: prompt {number} has no token; begin an empty one with the end of a document")
        if outside := [token for token in prompt if not 0 <= token < vocab_size]:
            raise ValueError(f"generate: prompt {number}: token {outside[0]} lies outside 0 to {vocab_size - 1}")
