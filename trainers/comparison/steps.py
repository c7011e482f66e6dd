"""The first step at which two runs differ, from their metrics.jsonl; and their models, layouts and settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from commengine import UsageError
from commengine.errors import usage_errors
from trainers.checkpoints import pointer
from trainers.checkpoints.checkpoint import saved_state
from trainers.checkpoints.parallel_safetensors import some
from trainers.checks.digests import LAYOUT, SUFFIX, of_row
from trainers.run.metrics import read_rows

#: the settings that name the run itself
_OWN = ("save", "load")

Row = Mapping[str, Any]


def unlike_models(one: Path, other: Path) -> str:
    """How the models of two checkpoints differ in the names of their parameters; "" if they do not.

    Raises UsageError where a state.json is damaged.
    """
    first, second = (saved_state(path, verify=False).parameters.keys() for path in (one, other))
    alone = (("first", first - second), ("second", second - first))
    return "; ".join(f"in the {run} model only: {some(sorted(names))}" for run, names in alone if names)


def layouts(rows: Iterable[Mapping[str, Any]]) -> str:
    """The layouts in which a run did the steps of these rows, in words, such as "1 x 2 at steps 1 to 3; 2 x 1 at 4".

    A layout is tensor x data, and in a pipeline x stages. The ranks of a context group follow by name.
    """

    def layout(row: Row) -> str:
        sizes = {axis: f"{row[name]:.0f}" for name, axis in LAYOUT.items() if name in row}
        if "context" in sizes:
            sizes["context"] = f"context {sizes['context']}"
        return " x ".join(sizes.values()) or "not known"

    spans = [(name, [row["iteration"] for row in some_rows]) for name, some_rows in groupby(rows, layout)]
    if len(spans) == 1:
        return spans[0][0]
    return "; ".join(f"{name} at {span_of(steps)}" for name, steps in spans)


def unlike_settings(one: Path, other: Path) -> list[str]:
    """Each setting in which two runs' folders differ, by the records of their checkpoints, but for names of folders.

    A setting that changed when the run was started again has its values in their order, with the checkpoint that was
    the first to have each. Raises UsageError where a state.json is damaged.
    """
    first, second = _histories(one), _histories(other)
    common = [name for name in first if name in second and name not in _OWN]
    unlike = [name for name in common if list(first[name].values()) != list(second[name].values())]
    return [f"{name} {_told(first[name])} and {_told(second[name])}" for name in unlike]


def _histories(folder: Path) -> dict[str, dict[str, Any]]:
    """For each setting its values in their order, by the name of the first checkpoint that has each."""
    found: dict[str, dict[str, Any]] = {}
    for path in pointer.history(folder):
        for name, value in saved_state(path, verify=False).settings.items():
            values = found.setdefault(name, {})
            if not values or list(values.values())[-1] != value:
                values[path.stem] = value
    return found


def _told(history: Mapping[str, Any]) -> str:
    (_, first), *later = history.items()
    return f"{first}" + "".join(f", then {value} (in {name})" for name, value in later)


def span_of(steps: Sequence[int]) -> str:
    """The steps in words: "step 3", or "steps 3 to 5"."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


@dataclass(frozen=True)
class Steps:
    """The steps of two runs that both have digests.

    compared: their numbers, in order. different: the first step at which a digest differs, or None. names: what differs
    there: "loss", "norm", "weights". rows: both runs' rows of that step, or two empty ones. unmatched: the numbers of
    the steps of the first run alone, and of the second. layouts: those of the first run, and of the second, in words.
    """

    compared: list[int]
    different: int | None = None
    names: tuple[str, ...] = ()
    rows: tuple[Row, Row] = ({}, {})
    unmatched: tuple[list[int], list[int]] = ([], [])
    layouts: tuple[str, str] = ("", "")

    def lines(self) -> list[str]:
        """The result in words."""
        said = [self._compared(), *self._values()]
        for name, steps in zip(("first", "second"), self.unmatched, strict=True):
            if steps:
                comma, verb = (",", "are") if len(steps) > 1 else ("", "is")
                said.append(f"{_span(steps)}{comma} {verb} in the {name} run only, and {verb} not compared")
        if any(self.layouts):
            said.append("tensor x data ranks, which may differ between deterministic runs:")
            said += [f"  {name} run: {text}" for name, text in zip(("first", "second"), self.layouts, strict=True)]
        return said

    def _compared(self) -> str:
        if not self.compared:
            return "no step has digests in both runs"
        span = _span(self.compared)
        if self.different is None:
            return f"{span}: the loss, the gradient's norm and the weights have the same bits"
        verb = "is" if len(self.compared) == 1 else "are"
        return f"step {self.different} is the first that differs ({span} {verb} compared): {', '.join(self.names)}"

    def _values(self) -> Iterator[str]:
        """The losses and norms of the step that differs, where they do."""
        one, other = self.rows
        for name in one:
            if (name == "grad_norm" or name.endswith("loss")) and name in other and one[name] != other[name]:
                yield f"  {name}: {_apart(one[name], other[name])}"


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
    with usage_errors("give the --save folders of two runs: "):
        rows, _ = read_rows(path)
    found: dict[int, Row] = {row["iteration"]: row for row in rows if of_row(row)}
    if not found:
        raise UsageError(f"{path}: has no digests; train with --deterministic, or with --log-digests")
    return found


def _apart(one: float | None, other: float | None) -> str:
    if one is None or other is None:
        return f"{one} and {other}"
    return f"{one!r} and {other!r}, {abs(one - other):.3g} apart"
