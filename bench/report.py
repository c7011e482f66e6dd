"""The results in a folder as one self-contained HTML page: ``python -m bench.report DIR [--output report.html]``.

Files of one name (all_reduce.md, .json, .png) make a section. Markdown becomes HTML, pictures are embedded, results of
bench.collectives are drawn and tabled, a model of bench.fit is tabled; every JSON can be unfolded. The page loads
nothing from anywhere.
"""

from __future__ import annotations

import base64
import html
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.measurements import read
from bench.options import new_parser
from commengine import UsageError

PICTURES = {".png": "image/png", ".svg": "image/svg+xml", ".jpg": "image/jpeg"}
KINDS = (".md", ".json", *PICTURES)
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


# ---- markdown: what this project's results are written in


def inline(text: str) -> str:
    """`code`, **bold** and [text](address) of one line; addresses are shown, for the page stands alone."""
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
    """Lines of a markdown table: heads, alignment, rows."""
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines]
    classes = [' class="right"' if mark.endswith(":") else "" for mark in rows[1]]
    yield "<table>"
    for number, row in enumerate([rows[0], *rows[2:]]):
        tag = "td" if number else "th"
        cells = zip(row, classes + [""] * len(row), strict=False)
        yield f"<tr>{''.join(f'<{tag}{kind}>{inline(cell)}</{tag}>' for cell, kind in cells)}</tr>"
    yield "</table>"


def markdown(text: str) -> Iterator[str]:
    """Headings, lists, tables, indented and fenced code, paragraphs."""
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
    """An image inside the page."""
    return f'<img alt="{html.escape(name)}" src="data:{kind};base64,{base64.b64encode(data).decode()}">'


def collectives(path: Path, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What bench.collectives measured: time and bus bandwidth over size, and nccl-tests' columns."""
    from matplotlib.figure import Figure

    series, _ = read(path)
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    times, bandwidths = figure.subplots(1, 2)
    for one in series:
        label = f"{one.operation}, {one.ranks} ranks, {one.variant}"
        shown = one.sizes > 0
        times.plot(one.sizes[shown], one.seconds[shown], "o-", markersize=3, label=label)
        mine = [row for row in rows if row["bytes"] and row.get("busbw") and _is_of(row, one.key)]
        mine.sort(key=lambda row: float(row["bytes"]))
        bandwidths.plot([row["bytes"] for row in mine], [row["busbw"] for row in mine], "o-", markersize=3)
    times.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds")
    times.legend(fontsize="x-small")
    bandwidths.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg")
    yield picture(drawn.getvalue(), PICTURES[".svg"], path.stem)
    columns = ("operation", "transport", "group", "ranks", "dtype", "redop", "in_place", "bytes", "count")
    lines = [
        f"| {' | '.join(columns)} | p50, us | p95, us | p99, us | algbw | busbw | wrong |",
        "|" + "---|" * len(columns) + "---:|" * 6,
    ]
    for row in rows:
        spent = [
            f"{1e6 * row['seconds'][name]:.4g}" if name in row["seconds"] else "" for name in ("p50", "p95", "p99")
        ]
        rates = [f"{row[name]:.4g}" if row.get(name) is not None else "" for name in ("algbw", "busbw", "wrong")]
        lines.append(f"| {' | '.join([*(str(row.get(name)) for name in columns), *spent, *rates])} |")
    yield from table(lines)


def _is_of(row: dict[str, Any], key: dict[str, Any]) -> bool:
    return all(row.get(name) == value for name, value in key.items())


def model(data: dict[str, Any]) -> Iterator[str]:
    """What bench.fit found."""
    lines = ["| operation | ranks | from bytes | alpha, us | 1 / beta, GB/s |", "|---|---:|---:|---:|---:|"]
    for operation, segments in data["collectives"].items():
        for one in segments:
            rate = f"{1e-9 / one['beta']:.4g}" if one["beta"] else "inf"
            lines.append(
                f"| {operation} | {one['ranks']} | {one['from_bytes']:g} | {1e6 * one['alpha']:.4g} | {rate} |"
            )
    yield from table(lines)


def results(path: Path) -> Iterator[str]:
    """A JSON file: what is known of its kind, and the file, folded."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    if isinstance(data, dict):
        about = [f"{name}: {data[name]}" for name in ("command", "date", "hardware", "versions") if name in data]
        if about and not path.with_suffix(".md").exists():  # which says so too
            yield f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in about)}</ul>"
        try:
            if isinstance(data.get("rows"), list) and data.get("format") == 1:
                yield from collectives(path, data["rows"])
            elif isinstance(data.get("collectives"), dict):
                yield from model(data)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: {error!r}") from error
    shown = text if len(text) <= FOLDED else f"{text[:FOLDED]}\n... {len(text) - FOLDED} characters more"
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
            lines += markdown(mine[".md"].read_text(encoding="utf-8"))
        else:
            lines.append(f"<h2>{html.escape(stem)}</h2>")
        lines += [picture(mine[kind].read_bytes(), PICTURES[kind], stem) for kind in PICTURES if kind in mine]
        if ".json" in mine:
            lines += results(mine[".json"])
        lines.append("</section>")
    head = f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>'
    return "\n".join([f"{head}<style>{STYLE}</style></head>", "<body>", *lines, "</body>", "</html>", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; the exit status."""
    options = new_parser("bench.report", __doc__)
    options.add_argument("folder", type=Path, metavar="DIR", help="results: markdown, JSON, pictures")
    options.add_argument("--output", type=Path, metavar="FILE", help="the page (default: DIR/report.html)")
    arguments = options.parse_args(argv)
    output = arguments.output or arguments.folder / "report.html"
    try:
        output.write_text(page(arguments.folder), encoding="utf-8")
    except (UsageError, OSError, UnicodeError) as error:
        options.error(str(error))
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
