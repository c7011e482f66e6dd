"""The runs that fine-tuning starts from, goes on with, or uses: their folders, their settings, and how good they are.

Of several runs that differ in their seed the median is the result (paper, section 5.3).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from commengine import UsageError
from commengine.errors import usage_errors
from commengine.files.reading import fault_in
from trainers.checkpoints import checkpoint, disk, pointer
from trainers.checkpoints.state_file import kind_of
from trainers.run import metrics
from trainers.settings.commands import BERTSettings
from trainers.settings.saving import of_other_program
from trainers.tasks.other_models import require_kind, settings_of_other
from trainers.trained import read_settings, saved_model
from trainers.weights.opening import open_other

from .settings import SHAPE, FinetuneSettings

#: in the folder of several runs: how good each is, and which is the median (`summarize`)
SEEDS = "seeds.json"
_PREFIX = "validation_"


def pretrained(folder: str | None, *, verify: bool) -> tuple[Mapping[str, Any], str]:
    """(The settings of the BERT in ``folder``, the words for it). Raises UsageError for anything else.

    folder: of a run of pretrain_bert, or ``hf:FOLDER``.
    """
    if folder is None:
        raise UsageError(
            "--pretrained-checkpoint: needed: a run of pretrain_bert to start from, because the folder of --load and "
            "--save holds no checkpoint yet"
        )
    if of_other_program(folder):
        other = open_other(folder)
        other.close()
        require_kind(folder, other.kind, "bert")
        return asdict(settings_of_other(BERTSettings, other, folder)), f"--load {folder}"
    found, _, state = saved_model(Path(folder), "bert", verify=verify)
    return asdict(read_settings(found, BERTSettings, state.settings)), f"--load {folder}"


def fine_tuned(found: Path, words: str, *, verify: bool) -> Mapping[str, Any]:
    """The settings of the run of ``finetune`` that wrote a checkpoint. Raises UsageError for any other run.

    words: the option that names the run, and its folder. verify: compare the settings with their checksum.
    """
    state = checkpoint.saved_state(found, verify=verify)
    if kind_of(state) != "finetune":
        raise UsageError(f"{words}: is no run of finetune, so it has learnt no task; to train it, give --save DIR")
    settings = read_settings(found, FinetuneSettings, state.settings)
    # A run may leave the width to its default, and older versions had one epsilon only.
    needed = {"task", "seq_length", *SHAPE} - {"ffn_hidden_size", "norm_epsilon"}
    if lacking := sorted(name for name in needed if not getattr(settings, name)):
        raise checkpoint.cannot_load(found, ValueError(f"{found / pointer.STATE}: settings: {lacking[0]} is missing"))
    return asdict(settings)


def best_checkpoint(folder: str, option: str) -> Path:
    """The best checkpoint of a run, or the newest if it marks none; of several runs, that of the median run.

    Or ``folder`` itself, if it is a checkpoint. Raises UsageError, naming ``option``, if there is none.
    """
    path = Path(folder)
    if (path / pointer.STATE).is_file():
        return path
    if (path / SEEDS).is_file():
        path = path / median_run(path / SEEDS)
    found = pointer.best(path) or checkpoint.find(path)
    if found is None:
        problem = "holds no checkpoint" if path.is_dir() else "no such folder"
        raise UsageError(f"{option} {folder}: {problem}; valid: the --save folder of a run of finetune")
    return found


def median_run(summary: Path) -> str:
    """The name of the median run's folder. Raises UsageError if the file is damaged."""
    with fault_in(f"{summary}: cannot be read"):
        name = json.loads(summary.read_bytes())["median_run"]
        if Path(name).name != name:
            raise ValueError("names no run")
    return str(name)


def summarize(folder: Path, runs: Sequence[Path], measure: str) -> dict[str, Any]:
    """Write ``folder/seeds.json``: the measures of each run's best checkpoint, and the median run by ``measure``.

    runs: their folders in ``folder``. Of an even number of runs, the median is the lower one of the two in the middle,
    so that it is always a run. Rank 0 calls it. Raises UsageError where a run has no evaluation.
    """
    found = {run.name: best_measures(run, measure) for run in runs}
    ordered = sorted(found, key=lambda name: (found[name][measure], name))
    median = ordered[(len(ordered) - 1) // 2]
    summary = {"measure": measure, "median": found[median][measure], "median_run": median, "runs": found}
    disk.rewrite(folder / SEEDS, (json.dumps(summary, indent=1) + "\n").encode())
    return summary


def best_measures(run: Path, measure: str) -> dict[str, float]:
    """The measures of the evaluation with the largest ``measure``, the first of equal ones, and its iteration.

    The evaluation of a run that stopped early does not count, because another stop would have another one.
    """
    with usage_errors("--seeds: "):
        rows, _ = metrics.read_rows(run / "metrics.jsonl")
    key = f"{_PREFIX}{measure}"
    rows = [row for row in rows if row.get(key) is not None and not row.get(metrics.AT_STOP)]
    if (kept := pointer.best(run)) is not None:  # a run that went back may have lost a better one
        rows = [row for row in rows if row["iteration"] == pointer.iteration_of(kept)] or rows
    if not rows:
        raise UsageError(
            f"--seeds: {run} has no evaluation, so there is no median; leave out --eval-iters 0, and do not stop "
            "the run before its first evaluation"
        )
    best = max(rows, key=lambda row: (row[key], -row["iteration"]))
    return {name.removeprefix(_PREFIX): value for name, value in best.items()}


def seeds_text(summary: dict[str, Any]) -> str:
    """The table of a summary for people."""
    runs: dict[str, dict[str, float]] = summary["runs"]
    names = [name for name in next(iter(runs.values())) if name != "iteration"]
    width = max(len("run"), *(len(name) for name in runs)) + 2
    columns = [max(len(name), 10) + 2 for name in names]
    head = "".join(f"{name:>{size}}" for name, size in zip(names, columns, strict=True))
    lines = [f"{'run':<{width}}{'iteration':>11}{head}"]
    for run, values in runs.items():
        cells = "".join(f"{values[name]:>{size}.4f}" for name, size in zip(names, columns, strict=True))
        lines.append(f"{run:<{width}}{values['iteration']:>11,}{cells}")
    measure = summary["measure"].replace("_", " ")
    return "\n".join([*lines, f"median {measure}: {summary['median']:.4f} ({summary['median_run']})"])
