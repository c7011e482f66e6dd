"""Several runs that differ in their seed: how good each is, and which is the median (paper, section 5.3)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commengine import UsageError
from trainers.checkpoints import disk
from trainers.run import metrics

from .source import SEEDS

_PREFIX = "validation_"


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
    try:
        rows, _ = metrics.read_rows(run / "metrics.jsonl")
    except OSError as error:
        raise UsageError(f"{run / 'metrics.jsonl'}: {error.strerror}") from error
    key = f"{_PREFIX}{measure}"
    rows = [row for row in rows if row.get(key) is not None and not row.get(metrics.AT_STOP)]
    if not rows:
        raise UsageError(
            f"--seeds: {run} has no evaluation, so there is no median; leave out --eval-iters 0, and do not stop "
            "the run before its first evaluation"
        )
    best = max(rows, key=lambda row: (row[key], -row["iteration"]))
    return {name.removeprefix(_PREFIX): value for name, value in best.items()}


def text(summary: dict[str, Any]) -> str:
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
