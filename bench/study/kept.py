"""The rows that count of all that a study has measured: those of one state of the machine, and of these the best."""

from __future__ import annotations

from collections.abc import Sequence

from bench.collective_study.measurement import Measurement
from bench.collective_study.tables import alike
from bench.timing.states import States


def split(measured: Sequence[Measurement], states: States | None) -> tuple[list[Measurement], list[Measurement]]:
    """(kept, others) of measurements whose state_seen is a number of ``states``: one is kept for each call.

    It is of the state with most turns; a row of another state, which is then disturbed, counts only if there is none.
    Of several rows, those that converged come first, and then the narrower interval of the median.
    """
    kept, others = [], []
    for mine in alike(measured, lambda row: row.call):
        best = min(mine, key=lambda row: (_other(row, states), not row.converged, row.interval_percent))
        kept.append(best.but(state=None, disturbed=_other(best, states) or None))
        others += [row for row in mine if row is not best]
    return kept, others


def _other(row: Measurement, states: States | None) -> bool:
    """Whether a row is of another state than the one with most turns."""
    return states is not None and states.whole(row.state_seen or 0) != states.whole(states.main())


def worst(rows: Sequence[Measurement], tries: dict[tuple[str, int], int]) -> tuple[str, int] | None:
    """(operation, size) that should be measured again, or None: it has a row that is disturbed or did not converge.

    Those with the fewest ``tries`` come first, and of these the one with the longest interval.
    """
    found: dict[tuple[str, int], float] = {}
    for row in rows:
        if row.disturbed or not row.converged:
            unit = row.operation, row.bytes if row.asked_bytes is None else row.asked_bytes
            length = float("inf") if row.disturbed else row.interval_percent
            found[unit] = max(length, found.get(unit, 0.0))
    return min(found, key=lambda unit: (tries.get(unit, 0), -found[unit]), default=None)
