"""The models, layouts and settings of two runs, over all starts of each run that its files know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.checkpoints import pointer
from trainers.checkpoints.checkpoint import saved_state
from trainers.checkpoints.model_kind import kind_of
from trainers.checks.digests import LAYOUT

#: the settings that name the run itself
_OWN = ("save", "load")

_WORDS = {"gpt": "a GPT", "bert": "a BERT", None: "neither a GPT nor a BERT"}


def unlike_models(one: Path, other: Path) -> str:
    """How the models of two checkpoints differ in kind or in the names of their parameters; "" if they do not.

    Raises UsageError where a state.json is damaged.
    """
    first, second = (saved_state(path, verify=False).parameters.keys() for path in (one, other))
    kinds = [_WORDS[kind_of(names)] for names in (first, second)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} and {kinds[1]}"
    told = []
    for run, alone in (("first", first - second), ("second", second - first)):
        if alone:
            has = "is" if len(alone) == 1 else "are"
            such = "" if len(alone) == 1 else f", such as {min(alone)}"
            name = min(alone) if len(alone) == 1 else f"{len(alone)} parameters"
            told.append(f"{name} {has} in the {run} model only{such}")
    return "; ".join(told)


def layouts(rows: Iterable[Mapping[str, Any]]) -> str:
    """The layouts in which a run did the steps of these rows, in words, such as "1 x 2 at steps 1 to 3; 2 x 1 at 4"."""
    spans: list[tuple[str, list[int]]] = []
    for row in rows:
        known = all(name in row for name in LAYOUT)
        layout = " x ".join(f"{row[name]:.0f}" for name in LAYOUT) if known else "not known"
        if not spans or spans[-1][0] != layout:
            spans.append((layout, []))
        spans[-1][1].append(row["iteration"])
    if len(spans) == 1:
        return spans[0][0]
    return "; ".join(f"{layout} at {span_of(steps)}" for layout, steps in spans)


def unlike_settings(one: Path, other: Path) -> list[str]:
    """Each setting in which two runs' folders differ, by the records of their checkpoints, but for names of folders.

    A setting that changed when the run was started again has its values in their order, with the checkpoint that was
    the first to have each. Raises UsageError where a state.json is damaged.
    """
    first, second = _histories(one), _histories(other)
    return [
        f"{name} {_told(first[name])} and {_told(second[name])}"
        for name in first
        if name in second and name not in _OWN and _values(first[name]) != _values(second[name])
    ]


def span_of(steps: Sequence[int]) -> str:
    """The steps in words: "step 3", or "steps 3 to 5"."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _histories(folder: Path) -> dict[str, list[tuple[Any, str]]]:
    """The values of each setting in their order, each with the name of the first checkpoint that has it."""
    found: dict[str, list[tuple[Any, str]]] = {}
    for path in pointer.complete(folder):
        for name, value in saved_state(path, verify=False).settings.items():
            values = found.setdefault(name, [])
            if not values or values[-1][0] != value:
                values.append((value, path.stem))
    return found


def _values(history: Sequence[tuple[Any, str]]) -> list[Any]:
    return [value for value, _ in history]


def _told(history: Sequence[tuple[Any, str]]) -> str:
    (first, _), *later = history
    return f"{first}" + "".join(f", then {value} (in {name})" for value, name in later)
