"""The first step at which two runs differ, from the digests in their metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commengine import UsageError
from trainers.checks.digests import SUFFIX, of_row
from trainers.run.metrics import read_rows

from .settings import layouts, span_of

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Steps:
    """The steps of two runs that both have digests.

    compared: their numbers, in order. different: the first step at which a digest differs, or None. names: what differs
    there: "loss", "norm", "weights". rows: both runs' rows of that step. unmatched: the numbers of the steps of the
    first run alone, and of the second. layouts: those of the first run, and of the second, in words.
    """

    compared: list[int]
    different: int | None = None
    names: tuple[str, ...] = ()
    rows: tuple[Row, Row] | None = None
    unmatched: tuple[list[int], list[int]] = ([], [])
    layouts: tuple[str, str] = ("", "")

    def lines(self) -> list[str]:
        """The result in words."""
        return [*self._compared(), *self._unmatched(), *self._layouts()]

    def _layouts(self) -> list[str]:
        if not any(self.layouts):
            return []
        found = [f"  {name} run: {text}" for name, text in zip(("first", "second"), self.layouts, strict=True)]
        return ["tensor x data ranks, which may differ between deterministic runs:", *found]

    def _unmatched(self) -> list[str]:
        found = []
        for name, steps in zip(("first", "second"), self.unmatched, strict=True):
            if len(steps) == 1:
                found.append(f"step {steps[0]} is in the {name} run only, and is not compared")
            elif steps:
                found.append(f"{_span(steps)}, are in the {name} run only, and are not compared")
        return found

    def _compared(self) -> list[str]:
        if not self.compared:
            return ["no step has digests in both runs"]
        span = _span(self.compared)
        if self.different is None or self.rows is None:
            return [f"{span}: the loss, the gradient's norm and the weights have the same bits"]
        verb = "is" if len(self.compared) == 1 else "are"
        found = [f"step {self.different} is the first that differs ({span} {verb} compared): {', '.join(self.names)}"]
        one, other = self.rows
        for name in one:
            if name == "iteration" or name.endswith(SUFFIX) or name not in other or one[name] == other[name]:
                continue
            if name == "grad_norm" or name.endswith("loss"):
                found.append(f"  {name}: {_apart(one[name], other[name])}")
        return found


def compare_steps(one: Path, other: Path) -> Steps:
    """Compare the digests of two runs' folders. Raises UsageError where a run has none."""
    first, second = _digested(one), _digested(other)
    common = sorted(first.keys() & second.keys())
    unmatched = (sorted(first.keys() - second.keys()), sorted(second.keys() - first.keys()))
    ranks = (layouts(first.values()), layouts(second.values()))
    for iteration in common:
        mine, theirs = of_row(first[iteration]), of_row(second[iteration])
        if names := tuple(name.removesuffix(SUFFIX) for name in mine if mine[name] != theirs.get(name)):
            return Steps(common, iteration, names, (first[iteration], second[iteration]), unmatched, ranks)
    return Steps(common, unmatched=unmatched, layouts=ranks)


def _span(steps: list[int]) -> str:
    return span_of(steps) + (f", {len(steps)} of them" if len(steps) > 1 else "")


def _digested(folder: Path) -> dict[int, Row]:
    """The rows of the folder that have digests, by iteration."""
    path = folder / "metrics.jsonl"
    try:
        rows, _ = read_rows(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; give the --save folders of two runs") from error
    found: dict[int, Row] = {row["iteration"]: row for row in rows if of_row(row)}
    if not found:
        raise UsageError(f"{path}: has no digests; train with --deterministic, or with --log-digests")
    return found


def _apart(one: float | None, other: float | None) -> str:
    if one is None or other is None:
        return f"{one} and {other}"
    return f"{one!r} and {other!r}, {abs(one - other):.3g} apart"
