"""The text of `tplayers.generate`, as a contestant of bench.generation.

    mpiexec -n 2 python -m bench.contests.generated_text --task FILE [--one-token] [--trace FILE]

All ranks are one tensor group.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from bench.command.parser import new_program_parser
from bench.contests.generation_task import GenerationTask, checksum
from bench.contests.serving import serve
from commengine import Communicator, launch, trace
from tplayers import GPT, Sampling, generate
from tplayers.generation.choice import TokenChooser
from tplayers.generation.weight_copies import fast_model


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


def main(world: Communicator) -> None:
    """Set up, then do as the driver says."""
    options = new_program_parser("bench.contests.generated_text", __doc__)
    options.add_argument("--task", required=True, metavar="FILE", help="JSON file of a GenerationTask")
    options.add_argument("--one-token", action="store_true", help="a step is one token after the prompts, not a text")
    options.add_argument("--trace", metavar="FILE", help="file for the collectives of a token, as JSON")
    arguments = options.parse_args()
    task = GenerationTask.load(arguments.task)
    model = task.model(world).requires_grad_(False)  # as a model that a run has trained
    if arguments.trace is not None:
        found = communication(task, model)
        if world.rank == 0:
            Path(arguments.trace).write_text(json.dumps(found))
    step = (one_token if arguments.one_token else whole_text)(task, model)
    serve(step, world.rank, f"tensor {world.size}, {torch.get_num_threads()} thread a rank")


if __name__ == "__main__":
    launch.run(main, device="cpu")
