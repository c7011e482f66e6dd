"""What fine-tuned models say about a split of a task: measures and predictions, of one model or of an ensemble."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from commengine import Communicator, ProcessGrid, UsageError
from commengine.options.declared import flag_of, given, make_writable
from commengine.rank_zero import on_every_rank, on_rank_zero
from trainers.checkpoints import checkpoint, disk, pointer
from trainers.finetuning.completing import members, of_model, shape
from trainers.run import metrics
from trainers.run.evaluation import evaluate_sources
from trainers.training.precision import parameter_dtype

from . import source
from .batches import KeptLogits, LabelLoss
from .downstream import DownstreamTask, Part
from .settings import SHAPE, FinetuneSettings
from .task import held_out, open_task

#: settings on which the samples of a file depend: the members of an ensemble must have the same
_OF_SAMPLES = ("task", "seq_length", "max_qa_length", "squad_version", "max_query_length", "doc_stride")


def predict(config: FinetuneSettings, world: Communicator, folder: str | None = None) -> None:
    """Measure the models, and with ``--predict`` write their predictions. Collective over ``world``.

    config: complete. folder: of the run to use; None for that of ``--load``, or those of ``--ensemble``.

    Raises UsageError, on all ranks, where a file does not fit or cannot be written.
    """
    split = config.predict or "dev"
    task = on_every_rank(world, lambda: open_task(config))
    parts = on_every_rank(world, lambda: task.read(split))
    runs = members(config) or [folder or config.load or ""]
    option = "--ensemble" if members(config) else "--load"
    output = _output(config, split, runs[0])
    if output is not None:
        on_rank_zero(world, lambda: make_writable("--output", output))
    checkpoints = [_checkpoint(config, world, run, option) for run in runs]  # all are looked at before one computes
    with ProcessGrid(world, tensor=config.tensor_model_parallel_size) as grid:
        every = [_logits(one, grid, task, parts, found) for one, found in checkpoints]
    logits = task.averaged(every) if members(config) else every[0]

    def finish() -> None:
        measures = task.measures(parts, logits)
        threshold = config.null_score_diff_threshold
        if threshold is None:
            threshold = measures.get("threshold", _threshold_of(runs[0], option) if not members(config) else None)
        of = f"an ensemble of {len(runs)} runs" if len(runs) > 1 else runs[0]
        rows = [f"  {name.replace('_', ' '):<28}{value:10.4f}" for name, value in measures.items()]
        rows = rows or ["  no measures: the data has no labels"]
        print("\n".join([f"{config.task}, {split} data: {of}", *rows]), flush=True)
        if output is not None:
            files = task.predictions(parts, logits, threshold)
            files["measures.json"] = json.dumps(measures, indent=1) + "\n"
            for name, text in files.items():
                disk.rewrite(output / name, text.encode())
            print(f"written to {output}: {', '.join(files)}", flush=True)

    on_rank_zero(world, finish)


def _output(config: FinetuneSettings, split: str, run: str) -> Path | None:
    if config.predict is None:
        return None
    if config.output is not None:
        return Path(config.output)
    folder = Path(run)
    parent = folder.parent if (folder / pointer.STATE).is_file() else folder
    return parent / f"predictions_{split}"


def _checkpoint(config: FinetuneSettings, world: Communicator, run: str, option: str) -> tuple[FinetuneSettings, Path]:
    """The settings with the model of ``run``, and its checkpoint. Collective."""

    def find() -> list[Any]:
        found, words = source.best_checkpoint(run, option), f"{option} {run}"
        one = _member(config, source.fine_tuned(found, words, verify=config.verify_checkpoints), words)
        shape(one, world.size)
        return [str(found), asdict(one)]

    found, settings = on_rank_zero(world, find)
    return FinetuneSettings(**settings), Path(found)


def _logits(
    config: FinetuneSettings, grid: ProcessGrid, first: DownstreamTask, parts: list[Part], found: Path
) -> dict[str, Tensor]:
    """The logits of one model by part. first: the task that has encoded ``parts``. Collective over the grid's world."""

    def opened() -> DownstreamTask:
        task = open_task(config)
        if task.tokenizer.vocabulary() != first.tokenizer.vocabulary():
            raise UsageError(f"--ensemble: {found} was trained with another tokenizer than the first run")
        return task

    task = on_every_rank(grid.world, opened)
    dtype = parameter_dtype(bf16=config.bf16, fp16=config.fp16)
    model = task.model(shape(config, grid.world.size), grid.tensor, dtype)
    checkpoint.load_model(found, model, grid.world, verify=config.verify_checkpoints)
    model.to(grid.world.device)
    kept = KeptLogits({part.name: part.samples for part in parts})
    sources = held_out(config, parts, task, grid.data)
    total, active = sum(part.iterations for part in sources), grid.world.rank == 0
    with metrics.progress_bar(total, "batch", active=active, title=found.parent.name) as bar:
        evaluate_sources(model, LabelLoss(task.unit, kept), sources, grid, bar.update)
    return kept.gathered(grid.data)


def _member(config: FinetuneSettings, saved: Mapping[str, Any], run: str) -> FinetuneSettings:
    """The settings with the model of ``run``. Raises UsageError unless its samples are those of ``config``."""
    for name in _OF_SAMPLES:
        if getattr(config, name) != saved.get(name):
            raise UsageError(f"{run}: has {flag_of(name)} {saved.get(name)}, another one {given(config, name)}")
    tokenizer = config.tokenizer_model
    if members(config) and Path(str(saved.get("tokenizer_model"))).is_file():
        tokenizer = saved["tokenizer_model"]  # its own, which is then compared with that of the first run
    blank: dict[str, Any] = dict.fromkeys(SHAPE)
    return of_model(replace(config, tokenizer_model=tokenizer, **blank), saved, run)


def _threshold_of(run: str, option: str) -> float | None:
    """The threshold of SQuAD 2.0 that was the best one on the dev data when the checkpoint was saved."""
    found, name = source.best_checkpoint(run, option), "validation_threshold"
    path = found.parent / "metrics.jsonl"
    rows = metrics.read_rows(path)[0] if path.is_file() else []
    return {row["iteration"]: row[name] for row in rows if name in row}.get(pointer.iteration_of(found))
