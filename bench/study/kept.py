"""The rows that count of all that a study has measured: those of one state of the machine, and of these the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.collective_study.tables import Row, interval_percent
from bench.timing.states import States


def split(measured: Sequence[Row], states: States | None) -> tuple[list[Row], list[Row]]:
    """(kept, others) of rows whose "state_seen" is a number of ``states``: one is kept for each call and transport.

    It is of the state with most turns; a row of another state, which is then "disturbed", counts only if there is none.
    Of several rows, those that converged come first, and then the narrower interval of the median.
    """
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in measured:
        cells.setdefault((row["operation"], row["transport"], row["bytes"]), []).append(row)
    kept, others = [], []
    for mine in cells.values():
        best = min(mine, key=lambda row: (_other(row, states), not row["converged"], interval_percent(row)))
        plain = {name: value for name, value in best.items() if name != "disturbed"}
        kept.append(plain | {"state": None} | ({"disturbed": True} if _other(best, states) else {}))
        others += [row for row in mine if row is not best]
    return kept, others


def _other(row: Row, states: States | None) -> bool:
    """Whether a row is of another state than the one with most turns."""
    return states is not None and states.whole(row.get("state_seen") or 0) != states.whole(states.main())


def described(states: States | None) -> str:
    """The states that were seen, in one line."""
    if states is None or not states.known:
        return "States of the machine were not told apart: the ranks need cores of their own on one node."
    numbers = sorted({states.whole(number) for number in range(len(states.all))})
    seen = sorted(numbers, key=lambda number: -len(states.all[number].probes))
    words = [
        f"{1e6 * states.all[number].centre:.2f} us in {len(states.all[number].probes) / 2:.0f} turns" for number in seen
    ]
    if len(words) < 2:
        return f"One state of the machine was seen (MPI's 8 bytes: {''.join(words) or 'no turn yet'})."
    most = f"{words[0]}; {'; '.join(words[1:4])}{'; ...' if len(words) > 4 else ''}"
    return f"{len(words)} states of the machine were seen (MPI's 8 bytes: {most}); the rows are of the first."


def worst(rows: Sequence[Row], tries: dict[tuple[str, int], int]) -> tuple[str, int] | None:
    """(operation, size) that should be measured again, or None: it has a row that is disturbed or did not converge.

    Those with the fewest ``tries`` come first, and of these the one with the longest interval.
    """
    found: dict[tuple[str, int], float] = {}
    for row in rows:
        if row.get("disturbed") or not row["converged"]:
            unit = str(row["operation"]), int(row["asked_bytes"] if "asked_bytes" in row else row["bytes"])
            length = float("inf") if row.get("disturbed") else interval_percent(row)
            found[unit] = max(length, found.get(unit, 0.0))
    return min(found, key=lambda unit: (tries.get(unit, 0), -found[unit]), default=None)
