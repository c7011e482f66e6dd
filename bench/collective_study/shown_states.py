"""Which rows of collectives count, and by which name, if the machine had several states (bench/timing/states.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.collective_study.comparable import has_few_calls
from bench.timing.sampling import FEWEST
from bench.timing.states import States, name_states

from .tables import alike, table


def of_shown_states(rows: list[dict[str, Any]], states: States | None) -> list[dict[str, Any]]:
    """The rows of the states that are shown, with the names that `States.lines` describes; None if there is only one.

    A call that was always disturbed stands with the nearest state, and its row has "disturbed": true.
    """
    if states is None:
        return rows
    shown = states.shown()
    names = name_states(shown)
    kept: list[dict[str, Any]] = []
    for mine in alike(rows, "operation", "transport", "dtype", "redop", "in_place", "bytes", "skew"):
        numbers = [row["state"] for row in mine]
        best: dict[int, dict[str, Any]] = {}  # of several parts of one state, the one with most calls
        for row, number in zip(mine, states.assigned(numbers), strict=True):
            if number is not None and row["iterations"] > best.get(number, {"iterations": 0})["iterations"]:
                disturbed = {} if states.is_shown(row["state"]) else {"disturbed": True}
                best[number] = row | {"state": names[number] if len(shown) > 1 else None} | disturbed
        kept += best.values()
    return kept


def all_tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The tables of all rows, one for each operation, dtype, reduction and skew."""
    return [table(mine) for mine in alike(rows, "operation", "dtype", "redop", "skew")]


def uncounted_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Remarks on the rows that count in no comparison: of states which are not shown, and of few calls."""
    other = [row for row in rows if row.get("disturbed")]
    few = [row for row in rows if has_few_calls(row)]
    lines = []
    for sign, mine, why in (
        ("~", other, "were measured in other states only, stand with the nearest"),
        ("?", few, f"have fewer than {FEWEST} calls, so no interval"),
    ):
        sizes: dict[str, dict[int, None]] = {}
        for row in mine:
            sizes.setdefault(row["operation"], {})[row["bytes"]] = None
        words = "; ".join(f"{operation} of {', '.join(map(str, of))} bytes" for operation, of in sizes.items())
        if mine:
            lines.append(f"- {sign}: {len(mine)} of {len(rows)} rows {why}, and count in no comparison: {words}")
    return lines
