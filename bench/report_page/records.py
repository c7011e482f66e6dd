"""Markdown tables of the JSON that the commands of bench write: one of each list of objects, at any depth."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from bench.collective_study.tables import flat

MOST_ROWS = 2000  # of a table


def records(data: Any, name: str = "") -> Iterator[str]:
    """Yield the lines of a table for every list of objects in ``data``, of JSON's types.

    Values of nested objects have columns of their own; of a list of numbers, such as a value of each step, the median
    is shown. name: the keys that lead to ``data``.
    """
    if isinstance(data, list) and data and all(isinstance(one, dict) for one in data):
        rows = [_plain(one) for one in data[:MOST_ROWS]]
        if heads := list(dict.fromkeys(key for row in rows for key in row)):
            sides = ["---:" if all(_is_number(row.get(key, 0)) for row in rows) else "---" for key in heads]
            yield from ("", f"## {_text(name)}", "", _line(heads), f"|{'|'.join(sides)}|")
            yield from (_line([row.get(key) for key in heads]) for row in rows)
            if len(data) > MOST_ROWS:
                yield from ("", f"{len(data) - MOST_ROWS} more rows")
    elif isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from records(value, f"{name} {key}".strip())


def _plain(one: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an object that a cell can show."""
    found = {}
    for key, value in flat(dict(one)).items():
        if isinstance(value, list) and value and all(map(_is_number, value)):
            found[f"{key}_median" if len(value) > 1 else key] = statistics.median(value)
        elif isinstance(value, str | int | float | bool | None):
            found[key] = value
    return found


def _line(cells: list[Any]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _text(value: Any) -> str:
    """A value in a cell: four digits of a fraction; text as it is, whatever markdown would make of it."""
    shown = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return re.sub(r"([^\w\s.,:/+-])", r"\\\1", " ".join(shown.split())).replace("_", r"\_")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
