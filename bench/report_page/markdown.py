"""HTML of the subset of markdown in which this project's results are written."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from .tables import FOLDED_ROWS, TableCell, folded, table


def inline(text: str) -> str:
    """One line with `code`, **bold** and [text](address).

    An address is shown as text, because the page stands alone.
    """
    parts = []
    for number, part in enumerate(re.split(r"`([^`]*)`", text)):
        safe = html.escape(part)
        if number % 2:
            parts.append(f"<code>{safe}</code>")
            continue
        safe = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", safe)
        parts.append(re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r"\1 (\2)", safe))
    return "".join(parts)


def markdown(text: str) -> Iterator[str]:
    """Yield the HTML of headings, lists, tables, indented and fenced code, and paragraphs."""
    for block in _blocks(text):
        lines = block.split("\n")
        if block.startswith("```"):
            yield from _code(lines[1:-1] if lines[-1].startswith("```") else lines[1:])
        elif heading := re.match(r"(#+) (.*)", lines[0]):
            level = min(len(heading[1]) + 1, 6)
            yield f"<h{level}>{inline(heading[2])}</h{level}>"
        elif lines[0].startswith("|") and len(lines) > 1 and re.fullmatch(r"[|:\- ]+", lines[1]):
            yield from _table(lines)
        elif lines[0].startswith("    "):
            yield from _code(lines)
        elif re.match(r"\s*[-*] ", lines[0]):
            items = re.split(r"\n(?=\s*[-*] )", block)
            yield f"<ul>{''.join(f'<li>{inline(item.strip()[2:])}</li>' for item in items)}</ul>"
        else:
            yield f"<p>{inline(' '.join(lines))}</p>"


def _blocks(text: str) -> Iterator[str]:
    """The blocks between empty lines; fenced code is one block, whatever it holds, and so is a heading."""
    for number, part in enumerate(re.split(r"^(```[^\n]*\n.*?^```)[ ]*$", text, flags=re.MULTILINE | re.DOTALL)):
        if number % 2:
            yield part
            continue
        spaced = re.sub(r"^(#+ .*)$", r"\n\1\n", part, flags=re.MULTILINE)
        yield from (block.strip("\n") for block in re.split(r"\n\s*\n", spaced) if block.strip())


def _code(lines: Sequence[str]) -> Iterator[str]:
    """Code as it is; folded where it is long."""
    shown = [f"<pre>{html.escape(chr(10).join(lines))}</pre>"]
    yield from folded(f"{len(lines)} lines", shown) if len(lines) > FOLDED_ROWS else shown


def _table(lines: Sequence[str]) -> Iterator[str]:
    """A table. lines: the heads, the alignment, the rows."""
    rows = [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines
    ]
    right = [mark.endswith(":") for mark in rows[1]]
    yield from table(
        [inline(head) for head in rows[0]], [[TableCell(inline(one)) for one in row] for row in rows[2:]], right
    )
