"""The worth of a GPT on text: ``mpiexec -n 4 python -m trainers.evaluate --load RUN --task wikitext --data FILE``.

The tasks are those of the paper (Table 3) and perplexities of any text. Every window and every example is scored once,
by one of the N / T replicas of the model (T: --tensor-model-parallel-size), and the result has the same digits at
every number of replicas. Without mpiexec the command runs on one rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from commengine import Communicator, ProcessGrid, UsageError, launch
from commengine.rank_zero import on_rank_zero
from tplayers import GPT

from .data import text_files
from .run.startup import job_config
from .scoring import lambada, results, texts
from .scoring.passages import Passage, Windows
from .scoring.scorer import Scores, score
from .scoring.settings import HELD_OUT, LAMBADA, WIKITEXT, EvaluateConfig
from .trained import Trained, loaded


def main(world: Communicator) -> None:
    """One rank of the command. Rank 0 reads the flags; an error on any rank is raised on every rank."""
    config = job_config(world, EvaluateConfig, "evaluate")
    with loaded(config, world, kind="gpt") as (trained, grid):
        evaluate = _last_words if config.task == LAMBADA else _perplexity
        result = evaluate(config, trained, grid)
        on_rank_zero(grid.world, lambda: _report(config, result))


def _perplexity(config: EvaluateConfig, trained: Trained, grid: ProcessGrid) -> results.PerplexityResult:
    """The result of a task of windows. Collective over the grid's world."""
    length, stride = config.window(trained.settings)
    # Without one, the run's own documents lack only their words. One that was asked for is used, or the reason raised.
    optional = config.task == HELD_OUT and config.tokenizer_model is None
    tokenizer = None if optional and not trained.has_tokenizer else trained.tokenizer

    def read() -> texts.Texts:
        if config.task == HELD_OUT:
            return texts.read_held_out(trained.settings, tokenizer, trained.sources)
        assert config.data is not None
        assert tokenizer is not None
        if config.task == WIKITEXT:
            return texts.read_wikitext(config.data, tokenizer)
        if config.task == "jsonl":
            return texts.read_json_lines(config.data, config.json_key, tokenizer)
        return texts.read_plain(config.data, tokenizer)

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
    return results.PerplexityResult.of(config.task, scores, windows, found.counts, _about(trained))


def _last_words(config: EvaluateConfig, trained: Trained, grid: ProcessGrid) -> results.LambadaResult:
    """The result of LAMBADA. Collective over the grid's world."""
    length, _ = config.window(trained.settings)
    path = str(config.data)

    def read() -> texts.Texts:
        lines = list(text_files.read_lines(path, config.json_key))
        if not lines:
            raise ValueError(f"{path}: has no text")
        rows = lambada.encoded(lines, trained.tokenizer)
        lambada.require_fits(rows, length, [where for where, _ in lines])
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
        words = [
            {f"{name}_text": trained.tokenizer.decode_after(context, row[name]) for name in ("target", "predicted")}
            for context, row in zip(before, rows, strict=True)
        ]
        merged = [word | row for word, row in zip(words, rows, strict=True)]
        on_rank_zero(grid.world, lambda: lambada.save_predictions(named, merged))
    return results.LambadaResult(
        len(rows), sum(row["strict"] for row in rows), sum(row["last_token"] for row in rows),
        sum(example.cut for example in found), length, _about(trained),
    )  # fmt: skip


def _scored(
    config: EvaluateConfig, trained: Trained, grid: ProcessGrid, passages: Sequence[Passage], unit: str, *,
    predict: bool = False,
) -> Scores:  # fmt: skip
    """The scores of the passages, with a progress bar on rank 0. Collective over the grid's world."""
    assert isinstance(trained.model, GPT)
    interval = 1 if sys.stderr.isatty() else 15  # so that a log file does not fill with bars
    with tqdm(
        total=len(passages), unit=unit, disable=grid.world.rank != 0, ncols=100, file=sys.stderr, mininterval=interval
    ) as bar:
        return score(
            trained.model, passages, grid.data, batch=config.micro_batch_size, predict=predict,
            progress=lambda done: bar.update(done - bar.n),
        )  # fmt: skip


def _about(trained: Trained) -> results.ModelScored:
    dtype = str(trained.model.embedding.weight.dtype).removeprefix("torch.")
    return results.ModelScored(str(trained.checkpoint), trained.iteration, dtype)


def _report(config: EvaluateConfig, result: results.PerplexityResult | results.LambadaResult) -> None:
    """Print the result, and write the files that were asked for. On rank 0."""
    print(result.text(), end="", flush=True)
    if config.json is not None:
        results.save_json(Path(config.json), result.to_json())
    if config.plot is not None and isinstance(result, results.PerplexityResult):
        result.draw(Path(config.plot))


if __name__ == "__main__":
    launch.run(main, device="cpu")
