"""Which rows of collectives count, and by which name, if the machine had several states (bench/timing/states.py)."""

from __future__ import annotations

from collections.abc import Sequence

from bench.collective_study.measurement import Measurement, SeriesKey
from bench.timing.sampling import FEWEST
from bench.timing.states import States, name_states

from .tables import alike, table


def of_shown_states(rows: list[Measurement], states: States | None) -> list[Measurement]:
    """The rows of the states that are shown, with the names that `States.lines` describes; None if there is only one.

    A call that was always disturbed stands with the nearest state, and its row is disturbed.
    """
    if states is None:
        return rows
    shown = states.shown()
    names = name_states(shown)
    kept: list[Measurement] = []
    for mine in alike(rows, lambda row: row.call):
        numbers = [int(row.state or 0) for row in mine]
        best: dict[int, tuple[Measurement, int]] = {}  # of several parts of one state, the one with most calls
        for row, own, number in zip(mine, numbers, states.assigned(numbers), strict=True):
            if number is not None and (number not in best or row.calls > best[number][0].calls):
                best[number] = row, own
        for number, (row, own) in best.items():
            disturbed = {} if states.is_shown(own) else {"disturbed": True}
            kept.append(row.but(state=names[number] if len(shown) > 1 else None, **disturbed))
    return kept


def all_tables(rows: Sequence[Measurement]) -> list[str]:
    """The tables of all rows, one for each operation, dtype, reduction and skew."""

    def of_table(row: Measurement) -> SeriesKey:
        return row.key._replace(transport=None, in_place=None, buffers=None, state=None)

    return [table(mine) for mine in alike(rows, of_table)]


def uncounted_lines(rows: Sequence[Measurement]) -> list[str]:
    """Remarks on the rows that count in no comparison: of states which are not shown, and of few calls."""
    other = [row for row in rows if row.disturbed]
    few = [row for row in rows if row.has_few_calls]
    lines = []
    for sign, mine, why in (
        ("~", other, "were measured in other states only, stand with the nearest"),
        ("?", few, f"have fewer than {FEWEST} calls, so no interval"),
    ):
        sizes: dict[str, dict[int, None]] = {}
        for row in mine:
            sizes.setdefault(row.operation, {})[row.bytes] = None
        words = "; ".join(f"{operation} of {', '.join(map(str, of))} bytes" for operation, of in sizes.items())
        if mine:
            lines.append(f"- {sign}: {len(mine)} of {len(rows)} rows {why}, and count in no comparison: {words}")
    return lines
