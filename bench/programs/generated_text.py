"""The text of `tplayers.generate`, as a contestant of ``bench.contest generation``.

All ranks are one tensor group.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.programs.generation_task import GenerationTask, checksum
from commengine import Communicator, ProcessGrid, trace
from tplayers import GPT, Sampling, generate
from tplayers.generation.choice import TokenChooser
from tplayers.generation.fast_weights import fast_model
from trainers.trained import load_trained

ONE_TOKEN = "one token"


def whole_text(task: GenerationTask, model: GPT) -> Callable[[], float]:
    """A step that writes the task's texts."""
    return lambda: checksum(generate(model, task.prompts(), task.new_tokens))


def one_token(task: GenerationTask, model: GPT) -> Callable[[], float]:
    """A step that chooses the token after the prompts' last one, whose other tokens are in the cache.

    It is what `generate` does for each token, at a length that stays the same.
    """
    prompts = torch.tensor(task.prompts())
    cache = model.new_cache(task.batch, task.prompt_tokens)
    columns, greedy = model.embedding.weight.shape[0], Sampling(temperature=0)
    chooser = TokenChooser(model.comm, task.vocab_size, columns, greedy, prompts.device)
    fast, screen = fast_model(model, task.batch, 1, greedy, chooser.real)
    with torch.inference_mode():
        fast.hidden_states(prompts[:, :-1], cache=cache)
    cache.advance([task.prompt_tokens - 1] * task.batch)

    def step() -> float:
        with torch.inference_mode():
            hidden = fast.hidden_states(prompts[:, -1:], cache=cache)[0]
            logits = None if screen is None else screen.logits(hidden, 1)
            tokens, _ = chooser.choose(fast.logits(hidden) if logits is None else logits, None)
        return checksum([tokens.tolist()])

    return step


def communication(task: GenerationTask, model: GPT) -> list[tuple[str, int, int]]:
    """(operation, bytes, number) of the collectives of one token of every row, from traces. Collective."""
    found = []
    for count in (2, 3):  # what the third token adds
        with trace(model.comm) as log:
            generate(model, task.prompts(), count)
        found.append(Counter((event.operation, event.bytes) for event in log.events))
    found[1].subtract(found[0])
    return [(operation, size, number) for (operation, size), number in sorted(found[1].items()) if number]


@contextmanager
def contestant_on(world: Communicator, task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """The texts of a `GenerationTask`, or a token after the prompts in the way ONE_TOKEN. Collective over ``world``.

    way: otherwise a file for the collectives of a token, as JSON.
    """
    given = GenerationTask(**task)
    model = load_trained(f"hf:{given.weights}", ProcessGrid(world, tensor=world.size)).model
    assert isinstance(model, GPT)
    if way == ONE_TOKEN:
        step = one_token(given, model)
    else:
        step, found = whole_text(given, model), communication(given, model)
        if world.rank == 0:
            Path(way).write_text(json.dumps(found))
    yield step, f"tensor {world.size}, {torch.get_num_threads()} thread a rank"
