"""The whole page: the study's answers, and a section for each result of a folder."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from commengine import UsageError
from commengine.files.reading import InputFileError, fault_in, read_json, read_text, require_regular

from .records import records
from .rendering import inline, markdown

#: kinds of pictures: of several with one stem, the first is shown
PICTURES = {".svg": "image/svg+xml", ".png": "image/png", ".jpg": "image/jpeg"}
KINDS = (".md", *PICTURES, ".json")
FOLDED = 20_000  # characters of a JSON file that are shown
#: the file of a study: its answers stand first on the page
STUDY = "study.json"
TEMPLATES = Environment(loader=PackageLoader("bench", "report_page"), autoescape=True)
SCRIPT = TEMPLATES.get_template("page.js").render()


def page(folder: Path, problems: list[str]) -> str:
    """The page of a folder. Raises UsageError for a folder without results, or if none of them can be shown.

    A file that is damaged gets a note in its section, and one in ``problems``.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: not a folder")
    study = _study(folder / STUDY)
    own = (STUDY, "study.md") if study else ()  # shown first, and once
    paths = sorted(path for path in folder.iterdir() if path.suffix in KINDS and path.name not in own)
    if not paths and not study:
        raise UsageError(f"{folder}: no results: there is no {', '.join(KINDS)} in it")
    shown: set[bytes] = set()
    sections, whole = [], False
    for stem in dict.fromkeys(path.stem for path in paths):
        mine = {path.suffix: path for path in paths if path.stem == stem}
        pictures = [kind for kind in PICTURES if kind in mine]
        parts: list[Markup] = []
        for kind in (kind for kind in (".md", *pictures[:1], ".json") if kind in mine):
            try:
                parts.append(_part(mine[kind], shown, tabled=".md" in mine))
                whole = True
            except (UsageError, InputFileError) as error:
                problems.append(str(error))
                parts.append(inline(f"**Not shown:** `{error}`"))
        sections.append((stem, ".md" not in mine, parts))
    if problems and not whole and not study:
        raise UsageError(problems[0])
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return TEMPLATES.get_template("page.html").render(
        title=study["title"] if study else folder.resolve().name, study=study, sections=sections, script=SCRIPT,
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        inline=inline, markdown=markdown,
    )  # fmt: skip


def _part(path: Path, shown: set[bytes], *, tabled: bool) -> Markup:
    """The HTML of one file; of a picture that the page has already, nothing.

    shown: the pictures so far; this one is added. tabled: whether markdown beside a JSON file has its tables.
    """
    if path.suffix == ".md":
        return markdown(read_text(path))
    if path.suffix == ".json":
        text, data = read_text(path), read_json(path)
        with fault_in(f"{path}: cannot be shown", 500):
            tables = [] if tabled else [*records(data)]
        more = f"\n... {len(text) - FOLDED} more characters" if len(text) > FOLDED else ""
        folded = Markup("<details><summary>{}</summary>\n<pre>{}</pre></details>")
        return markdown("\n".join(tables)) + folded.format(path.name, text[:FOLDED] + more)
    data = require_regular(path).read_bytes()
    if data in shown:
        return Markup("")
    shown.add(data)
    encoded = base64.b64encode(data).decode()
    return Markup('<img alt="{}" src="data:{};base64,{}">').format(path.stem, PICTURES[path.suffix], encoded)


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
