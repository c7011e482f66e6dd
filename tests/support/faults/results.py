"""The results of ``python -m tests.faults``: a file with a row for each case, and the table in a document."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BEGIN = "<!-- faults: written by python -m tests.faults -->"
END = "<!-- faults: end -->"

#: the outcomes of a part that the table names; the rest is counted
SHOWN = 6

Row = dict[str, Any]


class Results:
    """The rows of a file of JSON lines. A later row of a case replaces an earlier one; a crash may have cut the last.

    A row has the part's name, the number of the case, whether it passed, its outcome, its seconds, the commit and the
    MPI that it ran with. A row without a number describes the part: title, demand, cases, and why it cannot be run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[tuple[str, int], Row] = {}
        self.parts: dict[str, Row] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                self._keep(json.loads(line))
        if text and not text.endswith("\n"):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")

    def _keep(self, row: Row) -> None:
        if "case" in row:
            self.rows[row["part"], row["case"]] = row
        else:
            self.parts[row["part"]] = row

    def add(self, row: Row) -> None:
        """Keep the row, and append it to the file."""
        self._keep(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def of(self, part: str) -> list[Row]:
        """The rows of a part, by the number of the case."""
        return [row for (name, _), row in sorted(self.rows.items()) if name == part]


def table(results: Results) -> str:
    """The results of all parts that the file knows, as markdown."""
    lines = ["| part | what is done | held to | cases | run | passed | failed | outcomes |"]
    lines.append("|---|---|---|---:|---:|---:|---:|---|")
    for name, part in sorted(results.parts.items()):
        rows = [row for row in results.of(name) if row["case"] < part["cases"]]
        passed = [row for row in rows if row["passed"]]
        cells = (part["cases"], len(rows), len(passed), len(rows) - len(passed), _counted(rows) or _unless_run(part))
        lines.append(f"| `{name}` | {part['title']} | {part['demand']} | {' | '.join(f'{cell}' for cell in cells)} |")
    if rows := [row for name in sorted(results.parts) for row in results.of(name)]:
        lines += ["", f"Commits: {_listed(row['commit'] for row in rows)}. MPI: {_listed(row['mpi'] for row in rows)}."]
    return "\n".join(lines) + "\n"


def _unless_run(part: Mapping[str, Any]) -> str:
    return f"not run: {part['why_not']}" if part.get("why_not") else "not run"


def _counted(rows: Iterable[Row]) -> str:
    count = Counter(row["outcome"] if row["passed"] else f"FAILED: {row['outcome'][:80]}" for row in rows)
    others = sum(number for _, number in count.most_common()[SHOWN:])
    shown = [f"{number} {words.replace('|', '/')}" for words, number in count.most_common(SHOWN)]
    return ", ".join(shown + [f"{others} others"] * bool(others))


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def check_document(path: Path) -> None:
    """Raise ValueError if `write_table` cannot write there, because a document has no marks."""
    if path.exists() and not (0 <= (text := path.read_text(encoding="utf-8")).find(BEGIN + "\n") < text.find(END)):
        raise ValueError(f"--table {path}: it has no lines {BEGIN} and {END}, between which the table goes")


def write_table(path: Path, text: str) -> None:
    """Put the table between the two marks of a document, or into a file of its own if there is no such file.

    Raises ValueError if the file exists and has no such marks.
    """
    if not path.exists():
        path.write_text(f"{BEGIN}\n{text}{END}\n", encoding="utf-8")
        return
    check_document(path)
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN + "\n")
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
