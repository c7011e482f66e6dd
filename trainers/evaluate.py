"""The worth of a GPT on text: ``mpiexec -n 4 python -m trainers.evaluate --load RUN --task wikitext --data FILE``.

The tasks are those of the paper (Table 3), perplexities of any text, and with ``--task lm-eval:NAME,NAME`` those of
lm-evaluation-harness (the extra "lm-eval"), which runs on rank 0 while the model computes on all ranks. Every window
and every example is scored once, by one of the N / T replicas of the model (T: --tensor-model-parallel-size), and the
result has the same digits at every number of replicas. Without mpiexec the command runs on one rank.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds
    from .scoring.settings import EvaluateSettings
    from .settings.command import answer_help

    answer_help(EvaluateSettings, "evaluate")

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from commengine import Communicator, ProcessGrid, UsageError, launch
from commengine.errors import one_line
from commengine.options.declared import require
from commengine.rank_zero import on_rank_zero
from tplayers import GPT

from .data import text_files
from .data.blend import blend_of, verify
from .run.metrics import progress_bar
from .run.startup import job_settings, verify_files
from .scoring import lambada, results, texts
from .scoring.passages import Passage, Windows
from .scoring.scorer import Scores, score
from .scoring.service import ModelService
from .scoring.settings import COMMAND, HELD_OUT, LAMBADA, WIKITEXT, EvaluateSettings, names_of, window
from .trained import Trained, loaded


def main(world: Communicator) -> None:
    """One rank of the command. Rank 0 reads the flags; an error on any rank is raised on every rank."""
    config = job_settings(world, COMMAND)
    with loaded(config, world, kind="gpt") as (trained, grid):
        if names_of(config):
            _harness(config, world, trained, grid)
            return
        if config.verify_data:  # over the world without a timeout: reading all data may take long
            verify_files(world, lambda part, parts: verify(blend_of(trained.settings), part, parts))
        evaluate = _last_words if config.task == LAMBADA else _perplexity
        result = evaluate(config, trained, grid)
        on_rank_zero(grid.world, lambda: _report(config, result))


def _harness(config: EvaluateSettings, world: Communicator, trained: Trained, grid: ProcessGrid) -> None:
    """Run lm-evaluation-harness on rank 0, which the others serve. An error of the user's is raised on all ranks."""
    assert isinstance(trained.model, GPT)
    length, _ = window(config, trained.settings)
    tokenizer = trained.tokenizer
    needed = "the tokenizer names neither a bos_token nor an eos_token; lm-evaluation-harness begins texts with one"
    require(tokenizer.start_token is not None, f"--tokenizer-model: {needed}")
    service = ModelService(
        world, grid, trained.model, tokenizer, batch=config.micro_batch_size, seed=config.seed, ends=trained.end_tokens
    )
    if world.rank:
        service.serve()
        return
    os.environ["DISABLE_MULTIPROC"] = "1"  # the harness would fork this rank of an MPI job
    os.environ.pop("LOCAL_RANK", None)  # the harness gives no results where it is not 0
    if config.offline:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    problem = ""
    try:
        from .scoring.harness import evaluate_tasks

        evaluate_tasks(config, service, length)
    except (UsageError, ValueError, KeyError, OSError, ImportError, AssertionError) as error:
        if service.busy:  # the other ranks are in a request, and not waiting for one
            raise
        problem = f"--task {config.task}: {one_line(error) or repr(error)}"
    service.stop(problem)


def _perplexity(config: EvaluateSettings, trained: Trained, grid: ProcessGrid) -> results.PerplexityResult:
    """The result of a task of windows. Collective over the grid's world."""
    length, stride = window(config, trained.settings)
    # Without one, the run's own documents lack only their words. One that was asked for is used, or the reason raised.
    optional = config.task == HELD_OUT and config.tokenizer_model is None
    tokenizer = None if optional and not trained.has_tokenizer else trained.tokenizer

    def read() -> texts.Texts:
        if config.task == HELD_OUT:
            return texts.read_held_out(trained.settings, tokenizer, trained.sources)
        assert config.data is not None
        assert tokenizer is not None
        if config.task == "jsonl":
            return texts.read_json_lines(config.data, config.json_key, tokenizer)
        return texts.read_whole(config.data, tokenizer, wikitext=config.task == WIKITEXT)

    option = f"--task {HELD_OUT}:" if config.data is None else "--data"
    found = texts.on_all_ranks(grid.world, option, read)
    windows = Windows(found.tokens, length, stride)
    if not len(windows):  # on all ranks
        where = f"--task {HELD_OUT}" if config.data is None else f"--data {config.data}"
        raise UsageError(
            f"{where}: has no text of at least two tokens; the second token is the first that is predicted"
        )
    if tokenizer is None and grid.world.rank == 0:
        print(f"no word perplexities: {trained.problem}", file=sys.stderr, flush=True)
    scores = _scored(config, trained, grid, windows, "window")
    assert config.task is not None
    return results.PerplexityResult(config.task, scores, windows, found.counts, _about(trained))


def _last_words(config: EvaluateSettings, trained: Trained, grid: ProcessGrid) -> results.LambadaResult:
    """The result of LAMBADA. Collective over the grid's world."""
    length, _ = window(config, trained.settings)
    path = str(config.data)

    def read() -> texts.Texts:
        lines = list(text_files.read_lines(path, config.json_key))
        if not lines:
            raise ValueError(f"{path}: has no text")
        rows = lambada.encoded(lines, trained.tokenizer, length)
        flat = [tokens for row in rows for tokens in row]
        return texts.Texts(flat, texts.TextCounts(len(rows), 0, 0, sum(map(len, flat))))

    flat = texts.on_all_ranks(grid.world, "--data", read).tokens
    found = lambada.examples(list(zip(flat[::3], flat[1::3], flat[2::3], strict=True)), length)
    passages, numbers = lambada.distinct(found)
    scores = _scored(config, trained, grid, passages, "text", predict=True)
    rows = []
    for example, (strict, last) in zip(found, numbers, strict=True):
        predicted, target = scores.predicted_of(strict), example.strict.tokens[-example.strict.scored :].tolist()
        final = scores.predicted_of(last)[-1]
        rows.append({
            "target": target, "predicted": predicted, "strict": predicted == target,
            "last_target": int(example.last.tokens[-1]), "last_predicted": final,
            "last_token": final == int(example.last.tokens[-1]),
        })  # fmt: skip
    if config.predictions is not None:
        named = Path(config.predictions)
        before = [example.strict.tokens[: -example.strict.scored].tolist() for example in found]
        told = [
            {f"{name}_text": trained.tokenizer.decode_after(context, row[name]) for name in ("target", "predicted")}
            | row
            for context, row in zip(before, rows, strict=True)
        ]
        on_rank_zero(grid.world, lambda: lambada.save_predictions(named, told))
    return results.LambadaResult(
        len(rows), sum(row["strict"] for row in rows), sum(row["last_token"] for row in rows),
        sum(example.cut for example in found), length, _about(trained),
    )  # fmt: skip


def _scored(
    config: EvaluateSettings, trained: Trained, grid: ProcessGrid, passages: Sequence[Passage], unit: str, *,
    predict: bool = False,
) -> Scores:  # fmt: skip
    """The scores of the passages, with a progress bar on rank 0. Collective over the grid's world."""
    assert isinstance(trained.model, GPT)
    with progress_bar(len(passages), unit, active=grid.world.rank == 0) as bar:
        return score(
            trained.model, passages, grid.data, batch=config.micro_batch_size, predict=predict,
            progress=lambda done: bar.update(done - bar.n),
        )  # fmt: skip


def _about(trained: Trained) -> results.ModelScored:
    dtype = str(trained.model.embedding.weight.dtype).removeprefix("torch.")
    return results.ModelScored(str(trained.checkpoint), trained.iteration, dtype)


def _report(config: EvaluateSettings, result: results.PerplexityResult | results.LambadaResult) -> None:
    """Print the result, and write the files that were asked for. On rank 0."""
    print(result.text(), end="", flush=True)
    if config.json is not None:
        results.save_json(Path(config.json), result.to_json())
    if config.plot is not None and isinstance(result, results.PerplexityResult):
        result.draw(Path(config.plot))


if __name__ == "__main__":
    launch.run(main, device="cpu")
