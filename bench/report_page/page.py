"""The whole page: its style, its one script, and a section for each result of a folder."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from commengine import UsageError
from trainers.files.reading import InputFileError, read_json, read_text

from .markdown import inline, markdown
from .measured import measured
from .pictures import PICTURES, is_drawn, of_stem

KINDS = (".md", ".json", *PICTURES)
#: the file of a study: its answers stand first on the page
STUDY = "study.json"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1500px; margin: 1em auto; padding: 0 1em; color: #222; }
h1 { font-size: 22px; margin: .2em 0; } .about { margin: .2em 0 .6em; color: #555; font-size: 13px; }
.table { overflow-x: auto; margin: .8em 0; } table { border-collapse: collapse; font-size: 13px; }
td, th { border: 1px solid #ccc; padding: .15em .5em; text-align: left; } th { background: #f2f2f2; }
td.right, th.right { text-align: right; font-variant-numeric: tabular-nums; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid #0072B2; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
code, pre { background: #f5f5f5; font-size: 13px; } pre { padding: 1em; overflow-x: auto; }
img { max-width: 100%; } section { border-top: 2px solid #ccc; margin-top: 2em; }
summary { cursor: pointer; color: #0050a0; }
nav ul { padding: 0; } nav li { display: inline; margin-right: 1.5em; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(540px, 100%), 1fr)); gap: 10px; }
code { overflow-wrap: anywhere; } p, li, h1, h2, summary { overflow-wrap: anywhere; }
.answers article { min-width: 0; }
.answers article { border: 1px solid #bbb; border-radius: 6px; padding: .3em .8em; font-size: 13px; line-height: 1.35; }
.answers h2 { font-size: 15px; margin: .2em 0; color: #0050a0; } .answers p, .answers ul { margin: .3em 0; }
.answers .table { margin: .3em 0; } .answers table { font-size: 12px; } .answers td.right { white-space: nowrap; }
.answers td, .answers th { padding: .15em .35em; }
"""
#: sorts the rows of a table by the column whose heading is clicked: numbers by their value, before words
SCRIPT = """
document.addEventListener("click", event => {
  const head = event.target.closest("thead th");
  if (!head) return;
  const body = head.closest("table").tBodies[0], column = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  const value = row => {
    const cell = row.cells[column];
    if (!cell) return "";
    const text = cell.dataset.v ?? cell.textContent.replaceAll(",", "").trim(), number = parseFloat(text);
    return Number.isNaN(number) ? text : number;
  };
  const rows = [...body.rows].map(row => [value(row), row]);
  rows.sort(([a], [b]) => typeof a !== typeof b ? (typeof a === "number" ? -1 : 1)
    : typeof a === "number" ? a - b : a.localeCompare(b));
  if (down) rows.reverse();
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows.map(([, row]) => row));
});
"""


def page(folder: Path, problems: list[str] | None = None) -> str:
    """The page of a folder. Raises UsageError for a folder without results, or if none of them can be shown.

    A file that is damaged gets a note in its section, and one in ``problems``.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: not a folder")
    problems = [] if problems is None else problems
    study = _study(folder / STUDY)
    own = (STUDY, "study.md") if study else ()  # shown first, and once
    paths = sorted(path for path in folder.iterdir() if path.suffix in KINDS and path.name not in own)
    if not paths and not study:
        raise UsageError(f"{folder}: no results: there is no {', '.join(KINDS)} in it")
    stems = list(dict.fromkeys(path.stem for path in paths))
    title = html.escape(str(study["title"]) if study else folder.resolve().name)
    lines = [f"<h1>{title}</h1>"]
    if study:
        lines += _answers(study)
    lines += ["<nav><ul>", *(f'<li><a href="#{html.escape(one)}">{html.escape(one)}</a></li>' for one in stems)]
    lines.append("</ul></nav>")
    pictures = {path.name for path in paths if path.suffix in PICTURES}
    shown: set[bytes] = set()
    whole = 0
    for stem in stems:
        mine = {path.suffix: path for path in paths if path.stem == stem}
        lines.append(f'<section id="{html.escape(stem)}">')
        if ".md" not in mine:
            lines.append(f"<h2>{html.escape(stem)}</h2>")
        for part in _parts(mine, shown, pictures):
            try:
                lines += [*part()]
                whole += 1
            except (UsageError, InputFileError) as error:
                problems.append(str(error))
                lines.append(f"<p><b>Not shown:</b> {html.escape(str(error))}</p>")
        lines.append("</section>")
    if problems and not whole and not study:
        raise UsageError(problems[0])
    script = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    # The browser itself then refuses other scripts, and all that is not in the page.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{script}'"
    head = (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{title}</title>'
    )
    end = [f"<script>{SCRIPT}</script>", "</body>", "</html>", ""]
    return "\n".join([f"{head}<style>{STYLE}</style></head>", "<body>", *lines, *end])


def _parts(files: dict[str, Path], shown: set[bytes], pictures: set[str]) -> Iterator[Callable[[], Iterable[str]]]:
    """Yield what makes the HTML of a section: of its markdown, its picture, its JSON."""
    if ".md" in files:
        yield lambda: markdown(read_text(files[".md"]))
    if any(kind in files for kind in PICTURES):
        yield lambda: of_stem(files, shown)
    if ".json" in files:
        path = files[".json"]
        yield lambda: measured(path, tabled=".md" in files, drawn=is_drawn(path, pictures))


def _study(path: Path) -> dict[str, Any] | None:
    """The study of the folder, if there is one with answers."""
    if not path.exists():
        return None
    try:
        data = read_json(path)
    except InputFileError:  # its section says so
        return None
    known = isinstance(data, dict) and data.get("kind") == "study" and isinstance(data.get("answers"), list)
    return data if known and {"title", "about"} <= data.keys() else None


def _answers(study: dict[str, Any]) -> Iterator[str]:
    """The questions of a study with their answers, side by side, so that one screen shows all of them."""
    yield f'<p class="about">{inline(str(study["about"]))}</p>'
    yield '<div class="answers">'
    for one in study["answers"]:
        yield f"<article><h2>{html.escape(one['question'])}</h2>"
        yield from markdown(one["answer"])
        yield "</article>"
    yield "</div>"
