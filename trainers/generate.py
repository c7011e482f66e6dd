"""Text that continues prompts: ``mpiexec -n 2 python -m trainers.generate --load RUN --prompt TEXT ...``."""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds
    from .generation.settings import GenerateSettings
    from .settings.command import answer_help

    answer_help(GenerateSettings, "generate")

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from commengine import Communicator, ProcessGrid, UsageError, launch
from commengine.files.writing import check_writable
from commengine.options.declared import given, require, words_of
from commengine.rank_zero import on_rank_zero
from tplayers import GPT, T5, Sampling, formulas
from trainers.settings import derived
from trainers.settings.command import Command
from trainers.settings.loading import NEEDS_LOAD
from trainers.settings.rules import Faults, Rule, first
from trainers.tasks.kinds import task_of

from .checkpoints import disk
from .generation.conversation import History, Lines, converse
from .generation.settings import GenerateSettings
from .generation.texts import Prompt, encoded, generate_texts, in_rounds, read_prompts
from .run.startup import job_settings
from .tasks.fitting import machine_memory
from .tokenizing.ends import not_taken
from .trained import Trained, loaded


def sampling_of(config: GenerateSettings) -> Sampling:
    """How tokens are drawn."""
    return Sampling(config.temperature, config.top_k, config.top_p, config.repetition_penalty)


def _faults(s: GenerateSettings, ranks: int) -> Faults:
    asked = [s.prompt is not None, s.prompts is not None, s.interactive]
    yield sum(asked) != 1, "--prompt, --prompts, --interactive: want exactly one of them"
    if s.interactive:
        split = given(s, "tensor_model_parallel_size")
        if s.pipeline_model_parallel_size > 1:
            split += f" times {given(s, 'pipeline_model_parallel_size')}"
        yield (
            derived.replica_size(s) != ranks,
            f"{split}: must be all {ranks} ranks with --interactive, which talks to one model",
        )
        yield s.num_samples != 1, f"{given(s, 'num_samples')}: must be 1 with --interactive"
        yield s.json is not None, "--json: excludes --interactive"


COMMAND = Command("generate", GenerateSettings, rules=[NEEDS_LOAD, Rule("interactive", first(_faults))])


def main(world: Communicator) -> int:
    """One rank of the command, collective over ``world``: the exit status."""
    config = job_settings(world, COMMAND)

    def read() -> list[Prompt]:
        check_writable(json=config.json, read=[config.prompts])
        if config.prompts is not None:
            return read_prompts(config.prompts)
        return [] if config.prompt is None else [Prompt("--prompt", config.prompt)]

    # Before the model is loaded, which may take minutes.
    prompts = [Prompt(*prompt) for prompt in on_rank_zero(world, read)]
    with loaded(config, world, kind=("gpt", "t5")) as (trained, grid):
        ends = _require_kind(config, trained)
        positions = trained.model.config.max_position_embeddings
        slide = given(config, "window_slide")
        require(config.window_slide <= positions, f"{slide}: must be at most the model's {positions} positions")
        if trained.settings.hf_files is not None:
            other = Path(trained.settings.hf_files)
            if line := on_rank_zero(world, lambda: not_taken(other, config.repetition_penalty)):
                _remark(world, line)
        if config.interactive:
            return _converse(config, grid, trained)
        tokens = on_rank_zero(world, lambda: encoded(prompts, trained.tokenizer, positions, ends))
        _require_memory(config, trained, max(map(len, tokens)))
        _write(config, grid, trained, prompts, tokens)
    return 0


def _require_kind(config: GenerateSettings, trained: Trained) -> Sequence[int]:
    """A prompt must end in one of these tokens. Raises UsageError for an option that a T5 does not have."""
    if not isinstance(trained.model, T5):
        return []
    stages = given(config, "pipeline_model_parallel_size")
    require(config.pipeline_model_parallel_size == 1, f"{stages}: a T5 writes text in one stage; leave it out")
    require(not config.interactive, "--interactive: needs a GPT, as a T5 does not continue what was said")
    slide = given(config, "window_slide")
    require(config.window_slide == 1, f"{slide}: a T5 has no window, as it knows any position; leave it out")
    return [] if trained.tokenizer.end_token is None else [trained.tokenizer.eod]


def _require_memory(config: GenerateSettings, trained: Trained, longest: int) -> None:
    """Raise UsageError if the keys and values of one batch exceed all memory of a machine, on all ranks.

    They are those of the stage with most layers. longest: the tokens of the longest prompt.
    """
    model, layers = trained.model, max(len(part.numbers) for part in task_of(trained.settings).parts())
    element, what, scores = next(model.parameters()).element_size(), "the keys and values", 0
    if isinstance(model, T5):  # its decoder keeps those of the encoder's output, too
        what, layers = "the encoder's scores, the keys and the values", model.config.num_layers
        heads = model.config.head_split(model.comm.size).local_heads
        # the distances of its encoder; its bias, its scores and their softmax
        scores = longest**2 * (8 + 3 * config.micro_batch_size * heads * element)
    longest_text = model.config.max_position_embeddings
    shape = replace(model.config.cost_shape(longest_text, tensor=model.comm.size), layers=layers)
    rows = config.micro_batch_size * config.num_samples
    tokens = min(longest_text, longest + config.max_new_tokens)
    needed = scores + formulas.key_value_bytes(shape, rows, tokens, model.comm.size, element_bytes=element)
    there = machine_memory(config.device)
    require(
        needed <= there,
        f"{given(config, 'micro_batch_size')}, {given(config, 'num_samples')}: {what} of {rows} texts of "
        f"{tokens} tokens need {needed / 1e9:,.1f} GB a rank; the machine has {there / 1e9:,.1f} GB",
    )


def _write(
    config: GenerateSettings, grid: ProcessGrid, trained: Trained, prompts: Sequence[Prompt], tokens: list[list[int]]
) -> None:
    """Write the texts of all prompts to standard output and ``--json``, in order. Collective over the grid's world."""
    world, model, replicas = grid.world, trained.model, grid.data.size
    assert isinstance(model, GPT | T5)
    size = min(config.micro_batch_size, -(-len(prompts) // replicas))
    batches = [range(first, min(first + size, len(prompts))) for first in range(0, len(prompts), size)]
    rows: list[dict[str, Any]] = []
    quiet = world.rank > 0 or len(batches) <= replicas
    bar = tqdm(total=len(prompts), unit="prompt", disable=True if quiet else None, file=sys.stderr, leave=False)

    def generated(mine: Sequence[int]) -> list[dict[str, Any]]:
        texts = generate_texts(
            model, trained.tokenizer, [tokens[number] for number in mine], config.max_new_tokens,
            sampling=sampling_of(config), seed=config.seed, samples=config.num_samples, numbers=mine,
            stop=words_of(config.stop),
            ends=trained.end_tokens, slide=config.window_slide, pipeline=grid.pipeline,
        )  # fmt: skip
        return [asdict(text) for text in texts]

    for texts in in_rounds(grid, batches, generated):

        def show(texts: list[dict[str, Any]] = texts) -> None:
            for text in sorted(texts, key=lambda text: (text["number"], text["sample"])):
                prompt = prompts[text["number"]].text
                if rows:
                    print()  # an empty line between two texts
                between = "\n" if isinstance(model, T5) else ""
                print((prompt + between if config.print_prompt else "") + text["text"], flush=True)
                rows.append({"prompt": prompt, **text})
            bar.update(len(texts) // config.num_samples)

        on_rank_zero(world, show)
    bar.close()
    if config.json is not None:
        path = Path(config.json)
        content = json.dumps({"texts": rows}, indent=1) + "\n"
        on_rank_zero(world, lambda: disk.rewrite(path, content.encode()))
    if slid := sum(row["slid"] for row in rows):  # on rank 0
        print(_slid(slid, config, model), file=sys.stderr, flush=True)


def _remark(world: Communicator, line: str) -> None:
    if world.rank == 0:
        print(line, file=sys.stderr, flush=True)


def _slid(count: int, config: GenerateSettings, model: GPT | T5) -> str:
    """The line that says that a window slid."""
    which = "a text" if count == 1 else f"{count} texts"
    return (
        f"{which} got longer than the {model.config.max_position_embeddings} positions of the model: its first tokens "
        f"were forgotten, {config.window_slide} at a time"
    )


def _converse(config: GenerateSettings, grid: ProcessGrid, trained: Trained) -> int:
    """A conversation on standard input and output: the exit status. Collective over the world, without a timeout."""
    world, model, tokenizer = grid.world, trained.model, trained.tokenizer
    assert isinstance(model, GPT)
    problem: list[OSError] = []

    def show(row: int, text: str) -> None:
        del row
        if world.rank == 0 and not problem:
            try:
                print(text, end="", flush=True)
            except OSError as error:  # the other ranks are in the middle of a collective
                problem.append(error)

    def answer(tokens: list[int], turn: int) -> str:
        (text,) = generate_texts(
            model, tokenizer, [tokens], config.max_new_tokens, sampling=sampling_of(config), seed=config.seed,
            numbers=[turn], stop=words_of(config.stop), ends=trained.end_tokens, slide=config.window_slide, show=show,
            pipeline=grid.pipeline,
        )  # fmt: skip
        show(0, "\n")

        def told() -> None:
            if problem:
                raise UsageError(f"standard output: {problem[0].strerror}")
            if text.slid:
                print(_slid(1, config, model), file=sys.stderr, flush=True)

        on_rank_zero(world, told)
        return text.text

    history = History(tokenizer.encode_around, model.config.max_position_embeddings, config.max_new_tokens)
    return converse(world, Lines(world), history, answer)


if __name__ == "__main__":
    launch.run(main, device="cpu")
