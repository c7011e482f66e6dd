"""Make one self-contained HTML page of the results in a folder.

    python -m bench.report DIR --output report.html

Files with one stem (all_reduce.md, .json, .png) make a section. Markdown becomes HTML, and pictures are embedded.
Results of bench.collectives and models of bench.fit are drawn and tabled. For any other JSON file without markdown
beside it, its lists of objects are tabled. Every JSON file can be unfolded. The page loads nothing from elsewhere.
"""

from __future__ import annotations

import base64
import html
import io
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.collective_study.fitted_series import draw as draw_fits
from bench.collective_study.fitted_series import fits_of
from bench.collective_study.results import read
from bench.collective_study.tables import draw
from bench.command.files import check_writable
from bench.command.parser import CommandParser, new_parser
from bench.command.start import user_errors
from commengine import UsageError
from trainers.files.reading import read_json, read_text, require_regular

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMMAND = "bench.report"
PICTURES = {".png": "image/png", ".svg": "image/svg+xml", ".jpg": "image/jpeg"}
KINDS = (".md", ".json", *PICTURES)
MOST_ROWS = 100  # of a table of other JSON
FOLDED = 20_000  # characters of a JSON file that are shown
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto; }
td, th { border: 1px solid #ccc; padding: .2em .6em; } th { background: #f2f2f2; }
td.right, th.right { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { background: #f5f5f5; font-size: 13px; } pre { padding: 1em; overflow-x: auto; }
img { max-width: 100%; } section { border-top: 2px solid #ccc; margin-top: 3em; }
nav li { display: inline; margin: 1em; }
"""


# ---- markdown: the subset in which this project's results are written


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


def table(lines: Sequence[str]) -> Iterator[str]:
    """Yield the HTML of a markdown table. lines: the heads, the alignment, the rows."""
    rows = [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines
    ]
    classes = [' class="right"' if mark.endswith(":") else "" for mark in rows[1]]
    yield "<table>"
    for number, row in enumerate([rows[0], *rows[2:]]):
        tag = "td" if number else "th"
        cells = zip(row, classes + [""] * len(row), strict=False)
        yield f"<tr>{''.join(f'<{tag}{kind}>{inline(cell)}</{tag}>' for cell, kind in cells)}</tr>"
    yield "</table>"


def markdown(text: str) -> Iterator[str]:
    """Yield the HTML of headings, lists, tables, indented and fenced code, and paragraphs."""
    blocks = re.split(r"\n\s*\n", re.sub(r"^(#+ .*)$", r"\n\1\n", text, flags=re.MULTILINE).strip("\n"))
    for block in blocks:
        lines = block.split("\n")
        while lines and not lines[0].strip():
            lines.pop(0)
        if not lines:
            continue
        if heading := re.match(r"(#+) (.*)", lines[0]):
            level = min(len(heading[1]) + 1, 6)
            yield f"<h{level}>{inline(heading[2])}</h{level}>"
        elif lines[0].startswith("|") and len(lines) > 1 and re.fullmatch(r"[|:\- ]+", lines[1]):
            yield from table(lines)
        elif lines[0].startswith("    ") or lines[0].startswith("```"):
            yield f"<pre>{html.escape(block.strip('`').strip(chr(10)))}</pre>"
        elif re.match(r"\s*[-*] ", lines[0]):
            items = re.split(r"\n(?=\s*[-*] )", "\n".join(lines))
            yield f"<ul>{''.join(f'<li>{inline(item.strip()[2:])}</li>' for item in items)}</ul>"
        else:
            yield f"<p>{inline(' '.join(lines))}</p>"


# ---- results


def picture(data: bytes, kind: str, name: str) -> str:
    """The HTML of an image that is embedded in the page."""
    return f'<img alt="{html.escape(name)}" src="data:{kind};base64,{base64.b64encode(data).decode()}">'


def drawing(figure: Figure, name: str) -> str:
    """The HTML of a plot, without the SVG prologue, which names a DTD on another server."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    text = drawn.getvalue()
    return picture(text[text.index("<svg") :].encode(), PICTURES[".svg"], name)


def collectives(path: Path, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the HTML of results of bench.collectives or bench.all_reduce: plots, and nccl-tests' columns."""
    read(path)  # raises UsageError that names the fault
    yield drawing(draw(rows), path.stem)
    columns = ("operation", "transport", "group", "ranks", "dtype", "redop", "in_place", "bytes", "count")
    heads = ("p50, us", "p95, us", "p99, us", "algbw, GB/s", "busbw, GB/s", "wrong")
    lines = [f"| {' | '.join([*columns, *heads])} |", "|" + "---|" * len(columns) + "---:|" * len(heads)]
    for row in rows:
        spent = [
            f"{1e6 * row['seconds'][name]:.4g}" if name in row["seconds"] else "" for name in ("p50", "p95", "p99")
        ]
        rates = [f"{row[name] / 1e9:.4g}" if row.get(name) is not None else "" for name in ("algbw", "busbw")]
        words = [*(str(row.get(name)) for name in columns), *spent, *rates, str(row.get("wrong", ""))]
        lines.append(f"| {' | '.join(words)} |")
    yield from table(lines)


def model(data: dict[str, Any], name: str, drawn: bool) -> Iterator[str]:
    """Yield the HTML of a model of bench.fit: a table, and a plot unless a picture has it (``drawn``)."""
    if (fitted := fits_of(data)) and not drawn:
        yield drawing(draw_fits(fitted), name)
    lines = ["| operation | ranks | from bytes | alpha, us | 1 / beta, GB/s |", "|---|---:|---:|---:|---:|"]
    for operation, segments in data["collectives"].items():
        for one in segments:
            rate = f"{1e-9 / one['beta']:.4g}" if one["beta"] else "inf"
            lines.append(
                f"| {operation} | {one['ranks']} | {one['from_bytes']:g} | {1e6 * one['alpha']:.4g} | {rate} |"
            )
    yield from table(lines)


def records(data: Any, name: str = "") -> Iterator[str]:
    """Yield a table of the plain values of every list of objects in other JSON (a plan, a step)."""
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
    plain = (str, int, float, bool, type(None))
    columns = list(dict.fromkeys(key for one in data for key, value in one.items() if isinstance(value, plain)))
    if not columns:
        return
    yield f"<h3>{html.escape(name)}</h3>"
    rows = (
        [f"{value:.6g}" if isinstance(value, float) else str(value) for value in map(one.get, columns)]
        for one in data[:MOST_ROWS]
    )
    yield from table([_line(columns), "|" + "---|" * len(columns), *map(_line, rows)])
    if len(data) > MOST_ROWS:
        yield f"<p>{len(data) - MOST_ROWS} more rows</p>"


def _line(words: Sequence[str]) -> str:
    """One line of a markdown table."""
    escaped = (word.replace("|", r"\|") for word in words)
    return f"| {' | '.join(escaped)} |"


def results(path: Path) -> Iterator[str]:
    """Yield the HTML of a JSON file: what its kind allows to show, and the file itself, folded."""
    text, data = read_text(path), read_json(path)
    if isinstance(data, dict):
        about = [f"{name}: {data[name]}" for name in ("command", "date", "hardware", "versions") if name in data]
        if about and not path.with_suffix(".md").exists():  # which says so too
            yield f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in about)}</ul>"
        try:
            if isinstance(data.get("rows"), list) and data.get("format") == 1:
                yield from collectives(path, data["rows"])
            elif isinstance(data.get("collectives"), dict):
                yield from model(data, path.stem, any(path.with_suffix(kind).exists() for kind in PICTURES))
            elif not path.with_suffix(".md").exists():  # which has the tables
                yield from records(data)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{path}: cannot be shown: {what[:500]}") from error
    shown = text if len(text) <= FOLDED else f"{text[:FOLDED]}\n... {len(text) - FOLDED} more characters"
    yield f"<details><summary>{html.escape(path.name)}</summary><pre>{html.escape(shown)}</pre></details>"


def page(folder: Path) -> str:
    """The whole page. Raises UsageError for a folder without results, or with a broken one."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: not a folder")
    paths = sorted(path for path in folder.iterdir() if path.suffix in KINDS)
    if not paths:
        raise UsageError(f"{folder}: no results: there is no {', '.join(KINDS)} in it")
    stems = list(dict.fromkeys(path.stem for path in paths))
    title = html.escape(folder.resolve().name)
    lines = [f"<h1>{title}</h1>", "<nav><ul>"]
    lines += [f'<li><a href="#{html.escape(stem)}">{html.escape(stem)}</a></li>' for stem in stems]
    lines.append("</ul></nav>")
    for stem in stems:
        lines.append(f'<section id="{html.escape(stem)}">')
        mine = {path.suffix: path for path in paths if path.stem == stem}
        if ".md" in mine:
            lines += markdown(read_text(mine[".md"]))
        else:
            lines.append(f"<h2>{html.escape(stem)}</h2>")
        lines += [
            picture(require_regular(mine[kind]).read_bytes(), PICTURES[kind], stem) for kind in PICTURES if kind in mine
        ]
        if ".json" in mine:
            lines += results(mine[".json"])
        lines.append("</section>")
    head = f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>'
    return "\n".join([f"{head}<style>{STYLE}</style></head>", "<body>", *lines, "</body>", "</html>", ""])


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    options.add_argument("folder", type=Path, metavar="DIR", help="folder of results: markdown, JSON, pictures")
    options.add_argument("--output", type=Path, metavar="FILE", help="the page (default: DIR/report.html)")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page. Returns the exit status."""
    with user_errors(COMMAND):
        arguments = parser().parse_args(argv)
        output = arguments.output or arguments.folder / "report.html"
        check_writable(output=output if arguments.output else None)
        output.write_text(page(arguments.folder), encoding="utf-8")
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
