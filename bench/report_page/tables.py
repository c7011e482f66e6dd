"""Tables of the page: a click on a heading sorts the rows, and a long table is folded."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

#: a longer table, or code of more lines, is folded
FOLDED_ROWS = 20


@dataclass(frozen=True)
class TableCell:
    """A cell: its HTML, and the number by which its column is sorted where the text does not begin with it."""

    shown: str
    value: float | None = None


def table(heads: Sequence[str], rows: Sequence[Sequence[TableCell]], right: Sequence[bool]) -> Iterator[str]:
    """Yield the HTML of a table. heads: HTML. right: whether a column stands at the right, as numbers do."""
    lines = [*_lines(heads, rows, right)]
    names = ", ".join(head for head in heads[:4] if head)
    yield from folded(f"{len(rows)} rows: {names}, ...", lines) if len(rows) > FOLDED_ROWS else lines


def folded(summary: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield ``lines`` so that a click on ``summary``, which is HTML, shows them."""
    yield f"<details><summary>{summary}</summary>"
    yield from lines
    yield "</details>"


def text_cell(text: object, value: float | None = None) -> TableCell:
    """A cell that shows ``text`` as it is."""
    return TableCell(html.escape(str(text)), value)


def _lines(heads: Sequence[str], rows: Sequence[Sequence[TableCell]], right: Sequence[bool]) -> Iterator[str]:
    classes = [' class="right"' if one else "" for one in right] + [""] * max(map(len, [heads, *rows]))
    yield '<div class="table"><table><thead><tr>'
    yield "".join(f"<th{kind}><button>{head}</button></th>" for head, kind in zip(heads, classes, strict=False))
    yield "</tr></thead><tbody>"
    for row in rows:
        cells = []
        for cell, kind in zip(row, classes, strict=False):
            value = "" if cell.value is None else f' data-v="{cell.value!r}"'
            cells.append(f"<td{kind}{value}>{cell.shown}</td>")
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
