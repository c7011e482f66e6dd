"""A model that all ranks hold, for a program that runs on rank 0 alone.

Rank 0 asks, and the other ranks serve it: each request goes to all ranks, which compute it together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from commengine import Communicator, ProcessGrid, UsageError
from commengine.rank_zero import broadcast_json
from tplayers import GPT, Sampling
from trainers.data.tokenizer import Tokenizer
from trainers.generation.texts import generate_texts, in_rounds

from .passages import Passage
from .scorer import Scores, score
from .texts import broadcast_tokens


class ModelService:
    """Scores passages and continues prompts on all ranks of ``grid``.

    world: the ranks of the grid, in the same order, without a timeout, because the other ranks wait here for as long as
    rank 0 does something else. batch: passages or prompts that a replica takes through the model at once.
    ends: see `generate_texts`.

    Rank 0 calls `score`, `generate`, and at last `stop`; meanwhile all other ranks are in `serve`.
    """

    def __init__(
        self, world: Communicator, grid: ProcessGrid, model: GPT, tokenizer: Tokenizer, *, batch: int, seed: int = 0,
        ends: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        self.world, self.grid, self.model, self.tokenizer = world, grid, model, tokenizer
        self.batch, self.seed, self.ends = batch, seed, ends
        #: whether the ranks are in a request: an error then belongs to all of them, or ends the job
        self.busy = False

    def score(self, passages: Sequence[Passage]) -> Scores:
        """The scores of the passages, with the most likely tokens. On rank 0."""
        found: Scores = self._ask({"do": "score", "scored": [one.scored for one in passages]}, passages)
        return found

    def generate(self, prompts: Sequence[Sequence[int]], asked: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """The tokens that continue each prompt, with those that end a text. On rank 0.

        prompts: tokens, at least one each. asked: for each prompt ``count``, the most new tokens; ``stop``, the strings
        that end it; and the fields of `tplayers.Sampling`, as ``sampling``.
        """
        order = {"do": "generate", "asked": [dict(one) for one in asked], "prompts": [list(one) for one in prompts]}
        found: list[list[int]] = self._ask(order)
        return found

    def stop(self, problem: str = "") -> None:
        """Let the other ranks leave `serve`. On rank 0. problem: raises UsageError with this text, on all ranks."""
        broadcast_json(self.world, {"do": "stop", "problem": problem})
        if problem:
            raise UsageError(problem)

    def serve(self) -> None:
        """Compute what rank 0 asks for, until it says `stop`. On all ranks but 0. Raises UsageError as they do."""
        while (order := broadcast_json(self.world, None))["do"] != "stop":
            self._answer(order, [])
        if order["problem"]:
            raise UsageError(order["problem"])

    def _ask(self, order: dict[str, Any], passages: Sequence[Passage] = ()) -> Any:
        self.busy = True
        found = self._answer(broadcast_json(self.world, order), passages)
        self.busy = False
        return found

    def _answer(self, order: dict[str, Any], passages: Sequence[Passage]) -> Any:
        """Compute what rank 0 asks for. Collective. passages: rank 0's."""
        if order["do"] == "generate":
            return self._generated(order)
        tokens = broadcast_tokens(self.world, [one.tokens for one in passages])
        every = [Passage(*one) for one in zip(tokens, order["scored"], strict=True)]
        return score(self.model, every, self.grid.data, batch=self.batch, predict=True)

    def _generated(self, order: dict[str, Any]) -> list[list[int]]:
        """The tokens, on rank 0; each batch on one replica."""
        prompts, asked = order["prompts"], order["asked"]

        def generated(numbers: Sequence[int]) -> list[tuple[int, list[int]]]:
            how = asked[numbers[0]]
            texts = generate_texts(
                self.model, self.tokenizer, [prompts[number] for number in numbers], how["count"],
                sampling=Sampling(**how["sampling"]), seed=self.seed, numbers=numbers, stop=how["stop"],
                ends=self.ends,
            )  # fmt: skip
            return [(text.number, text.tokens) for text in texts]

        batches = list(_alike(asked, [len(prompt) for prompt in prompts], self.batch))
        return [
            tokens for _, tokens in sorted(one for found in in_rounds(self.grid, batches, generated) for one in found)
        ]


def _alike(asked: Sequence[Mapping[str, Any]], lengths: Sequence[int], batch: int) -> Iterator[list[int]]:
    """The numbers of the prompts, in batches that ask for the same and are of similar length."""

    def key(number: int) -> str:
        return repr(sorted(asked[number].items()))

    order = sorted(range(len(asked)), key=lambda number: (key(number), -lengths[number], number))
    for _, same in groupby(order, key):
        numbers = list(same)
        yield from (numbers[first : first + batch] for first in range(0, len(numbers), batch))
