"""The table of a study, written row by row: a time limit that ends the program loses no row that was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class RowFile:
    """A markdown table and its numbers, on standard output and in the files that were asked for.

    heading: the lines before the table. columns: its head and its rule. result: what the JSON says besides "rows".
    quiet: write the files only.
    """

    def __init__(
        self, heading: Sequence[str], columns: Sequence[str], result: dict[str, Any], *, output: str | None,
        json_file: str | None, quiet: bool = False,
    ) -> None:  # fmt: skip
        self._result = result | {"rows": []}
        self._output, self._json, self._quiet = output, json_file, quiet
        self._text = ""
        self._say([*heading, "", *columns])

    def add(self, line: str, numbers: dict[str, Any]) -> None:
        """Add a row: a line of the table, and the same as an object for the JSON."""
        self._result["rows"].append(numbers)
        self._say([line])

    def _say(self, lines: Sequence[str]) -> None:
        new = "".join(f"{line}\n" for line in lines)
        self._text += new
        if not self._quiet:
            print(new, end="", flush=True)
        if self._output:
            _replace(self._output, self._text)
        if self._json:
            _replace(self._json, json.dumps(self._result, indent=1))


def _replace(name: str, text: str) -> None:
    """Write a file so that it is whole whenever the program ends: the old text or the new one."""
    path = Path(name)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
