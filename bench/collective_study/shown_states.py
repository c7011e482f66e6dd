"""Which rows of collectives count, and by which name, if the machine had several states (bench/timing/states.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.timing.states import States, name_states

from .tables import table


def of_shown_states(rows: list[dict[str, Any]], states: States | None) -> list[dict[str, Any]]:
    """The rows of the states that are shown, with the names that `States.lines` describes; None if there is only one.

    A call that was always disturbed counts for the nearest state, and its row has "disturbed": true.
    """
    if states is None:
        return rows
    shown = states.shown()
    names = name_states(shown)
    calls: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("operation", "transport", "dtype", "redop", "in_place", "bytes"))
        calls.setdefault(key, []).append(row)
    kept: list[dict[str, Any]] = []
    for mine in calls.values():
        numbers = [row["state"] for row in mine]
        best: dict[int, dict[str, Any]] = {}  # of several parts of one state, the one with most calls
        for row, number in zip(mine, states.assigned(numbers), strict=True):
            if number is not None and row["iterations"] > best.get(number, {"iterations": 0})["iterations"]:
                disturbed = {} if states.is_shown(row["state"]) else {"disturbed": True}
                best[number] = row | {"state": names[number] if len(shown) > 1 else None} | disturbed
        kept += best.values()
    return kept


def final_tables(rows: list[dict[str, Any]], printed: Sequence[str], show_again: Callable[[str], None]) -> list[str]:
    """The tables of all rows. Those that differ from the printed ones, because of later states, are shown again."""
    series: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        series.setdefault(tuple(row[name] for name in ("operation", "dtype", "redop")), []).append(row)
    found = [table(mine) for mine in series.values()]
    for text in found:
        if text not in printed:
            show_again(f"# again, because the states of the machine are told apart better now:\n{text}")
    return found


def disturbed_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A remark on the rows that were measured in states which are not shown."""
    sizes: dict[str, dict[int, None]] = {}
    for row in rows:
        if row.get("disturbed"):
            sizes.setdefault(row["operation"], {})[row["bytes"]] = None
    if not sizes:
        return []
    words = "; ".join(f"{operation} of {', '.join(map(str, mine))} bytes" for operation, mine in sizes.items())
    count = sum(bool(row.get("disturbed")) for row in rows)
    return [f"- ~: {count} of {len(rows)} rows were measured in other states only, and count for the nearest: {words}"]
