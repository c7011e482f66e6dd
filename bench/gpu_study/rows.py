"""The table of a study, written row by row: a time limit that ends the program loses no row that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.command.files import replace_json, replace_text
from bench.command.machine import heading


class RowFile:
    """A markdown table and its numbers, on standard output and in the files that were asked for.

    given: the settings of the study (`bench.gpu.parse`). columns: the table's head and its rule. lines: stand before
    the table. quiet: write the files only. numbers: what the JSON says besides the environment and "rows".
    """

    def __init__(
        self, given: Any, title: str, columns: Sequence[str], lines: Sequence[str] = (), *, quiet: bool = False,
        **numbers: Any,
    ) -> None:  # fmt: skip
        self._result = given.environment | numbers | {"rows": []}
        self._output, self._json, self._quiet = given.output, given.json, quiet
        self._text = ""
        self._say([*heading(title, given.environment), *(word for line in lines for word in ("", line)), "", *columns])

    def add(self, cells: Sequence[object], numbers: dict[str, Any]) -> None:
        """Add a row: its cells, and the same as an object for the JSON."""
        self._result["rows"].append(numbers)
        self._say([f"| {' | '.join(map(str, cells))} |"])

    def _say(self, lines: Sequence[str]) -> None:
        new = "".join(f"{line}\n" for line in lines)
        self._text += new
        if not self._quiet:
            print(new, end="", flush=True)
        if self._output:
            replace_text(Path(self._output), self._text)
        if self._json:
            replace_json(Path(self._json), self._result)


def finish(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
