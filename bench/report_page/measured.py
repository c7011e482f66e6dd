"""HTML of the JSON that the commands of bench write: collectives, fits, steps, and lists of objects of any kind."""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.collective_study.fitted_series import bandwidth, draw, fits_of, tables
from bench.collective_study.results import read
from bench.collective_study.shown_states import disturbed_lines
from bench.collective_study.tables import COLUMNS, OVERLAP, STATE, UNCONVERGED, WORDS, flat, size_label
from bench.collective_study.tables import draw as draw_collectives
from bench.step_study import step_tables
from commengine import UsageError
from trainers.files.reading import read_json, read_text

from .markdown import markdown
from .pictures import drawing
from .tables import TableCell, folded, table, text_cell
from .units import column, is_number, with_prefix

FOLDED = 20_000  # characters of a JSON file that are shown
MOST_ROWS = 2000  # of a table of other JSON
ABOUT = ("command", "date", "hardware", "versions")
#: columns of the tables of collectives whose cells have units, because they span many powers of ten
RATES = ("algbw", "busbw")
OWN_UNITS = ("size", *RATES)
#: columns that hold words
TEXTS = ("state", "type", "redop", "place", "transport")


def measured(path: Path, *, tabled: bool, drawn: bool) -> Iterator[str]:
    """Yield the HTML of a JSON file: what its kind allows to show, and the file itself, folded.

    tabled: whether markdown beside it has its tables and its heading. drawn: whether a picture of the folder has it.
    Raises UsageError that names the file and the fault.
    """
    text, data = read_text(path), read_json(path)
    if isinstance(data, dict):
        about = [f"{name}: {_words(data[name])}" for name in ABOUT if name in data]
        if about and not tabled:
            yield f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in about)}</ul>"
        try:
            if isinstance(data.get("rows"), list) and data.get("format") == 1:
                yield from _collectives(path, data["rows"], drawn=drawn)
            elif isinstance(data.get("collectives"), dict):
                yield from _model(data, path.stem, drawn=drawn)
            elif data.get("kind") == "step" and not tabled:
                yield from _step(data)
            elif not tabled:
                yield from records(data)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{path}: cannot be shown: {what[:500]}") from error
    shown = text if len(text) <= FOLDED else f"{text[:FOLDED]}\n... {len(text) - FOLDED} more characters"
    yield from folded(html.escape(path.name), [f"<pre>{html.escape(shown)}</pre>"])


def _words(value: Any) -> str:
    return ", ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, dict) else str(value)


def _collectives(path: Path, rows: Sequence[dict[str, Any]], *, drawn: bool) -> Iterator[str]:
    """Results of bench.collectives or bench.all_reduce: plots, and the columns of the terminal, by operation."""
    read(path)  # raises UsageError that names the fault
    if not drawn:
        yield drawing(draw_collectives(rows), path.stem)
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: float(row["bytes"])):
        kinds.setdefault((row["operation"], row["ranks"], row.get("group")), []).append(row)
    for (operation, ranks, group), mine in kinds.items():
        yield f"<h3>{html.escape(f'{operation}, {ranks} ranks' + (f' of group {group}' if group else ''))}</h3>"
        columns = [one for one in (*STATE, *COLUMNS, *OVERLAP) if any(_cell(one, row).shown for row in mine)]
        heads = [
            html.escape(", ".join(filter(None, (name, "" if name in OWN_UNITS else unit.strip("()")))))
            for name, unit, _, _ in columns
        ]
        yield from table(
            heads, [[_cell(one, row) for one in columns] for row in mine], [one[0] not in TEXTS for one in columns]
        )
    if slow := sum(row.get("converged") is False for row in rows):
        yield f"<p>*: {slow} of {len(rows)} rows ran out of time before {UNCONVERGED}.</p>"
    for line in disturbed_lines(rows):
        yield f"<p>{html.escape(line.removeprefix('- '))}.</p>"
    if late := sum(row.get("late") or 0 for row in rows):
        yield f"<p>{late} calls are not counted, because a rank began late.</p>"


def _cell(kind: Any, row: Mapping[str, Any]) -> TableCell:
    """A cell of the terminal's table; empty where the row lacks what it shows."""
    name, _, _, shown = kind
    if name == "size":
        return text_cell(size_label(row["bytes"]), float(row["bytes"]))
    if name in RATES:
        rate = row.get(name)
        return text_cell("" if rate is None else with_prefix(rate, "B/s"), rate)
    try:
        return text_cell(WORDS.get(shown(row), shown(row)) if name == "transport" else shown(row))
    except (KeyError, TypeError):
        return text_cell("")


def _model(data: dict[str, Any], name: str, *, drawn: bool) -> Iterator[str]:
    """A model of bench.fit: its tables, and a plot; of a file with segments alone, these."""
    if fitted := fits_of(data):
        if not drawn:
            yield drawing(draw(fitted), name)
        lines = [*tables(fitted)]
        first = lines.index("")
        yield from markdown("\n".join(lines[:first]))
        yield from folded("every size: measured, fitted, residual", markdown("\n".join(lines[first:])))
        return
    rows = [
        [
            text_cell(operation), text_cell(one["ranks"]), text_cell(size_label(one["from_bytes"]), one["from_bytes"]),
            text_cell(f"{1e6 * one['alpha']:.4g}"), text_cell(bandwidth(one["beta"])),
        ]
        for operation, segments in data["collectives"].items()
        for one in segments
    ]  # fmt: skip
    heads = ("operation", "ranks", "from, size", "alpha, us", "1 / beta, GB/s")
    yield from table(heads, rows, (False, True, True, True, True))


def _step(data: dict[str, Any]) -> Iterator[str]:
    """A step of bench.step: its phases, groups and parts with their times, and the formulas."""
    parts: list[tuple[str, Iterator[str]]] = [
        ("Phases of the step", step_tables.phase_table(data["phases"])),
        ("Collectives by group", step_tables.group_table(data["parts"])),
        ("Collectives by part of the step", step_tables.table(data["parts"])),
        ("Formulas and trace", step_tables.volume_table(data["formulas"])),
    ]
    yield from markdown("\n".join(step_tables.summary_lines(data["seconds"])))
    for heading, lines in parts:
        yield f"<h3>{heading}</h3>"
        yield from markdown("\n".join(lines))


def records(data: Any, name: str = "") -> Iterator[str]:
    """Yield a table of every list of objects in other JSON (a plan, a replay).

    Values of nested objects have columns of their own; of a list of numbers, such as a value of each step, the median
    is shown.
    """
    if isinstance(data, dict):
        for key, value in data.items():
            yield from records(value, f"{name} {key}".strip())
        return
    if not isinstance(data, list) or not data:
        return
    if not all(isinstance(one, dict) for one in data):
        for number, one in enumerate(data):
            yield from records(one, f"{name} {number}".strip())
        return
    rows = [_plain(one) for one in data[:MOST_ROWS]]
    names = list(dict.fromkeys(key for row in rows for key in row))
    if not names:
        return
    columns = [column(key, [row.get(key) for row in rows]) for key in names]
    yield f"<h3>{html.escape(name)}</h3>"
    cells = [[mine[number] for _, mine, _ in columns] for number in range(len(rows))]
    yield from table([html.escape(head) for head, _, _ in columns], cells, [right for _, _, right in columns])
    if len(data) > MOST_ROWS:
        yield f"<p>{len(data) - MOST_ROWS} more rows</p>"


def _plain(one: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an object that a cell can show."""
    found = {}
    for key, value in flat(dict(one)).items():
        if isinstance(value, list) and value and all(is_number(each) for each in value):
            found[f"{key}_median" if len(value) > 1 else key] = statistics.median(value)
        elif isinstance(value, str | int | float | bool | None):
            found[key] = value
    return found
