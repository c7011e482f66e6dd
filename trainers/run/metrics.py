"""What a run writes down while it runs: metrics.jsonl, TensorBoard, the progress bar. Rank 0 only."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm


class Metrics:
    """Rows of ``SAVE/metrics.jsonl``, scalars for TensorBoard, and a progress bar on standard error.

    folder: where the rows go; None writes none. start: the iteration the run begins at; rows of a later one, left by
    a run that went further than its last checkpoint, are dropped. total: the iteration the run ends at.
    active: false on all ranks but 0, where nothing is written.
    """

    def __init__(self, folder: Path | None, start: int, total: int, *, tensorboard: Path | None, active: bool) -> None:
        self.rows: list[dict[str, Any]] = []
        self._active = active
        self._path = folder / "metrics.jsonl" if folder is not None and active else None
        self._board = _summary_writer(tensorboard, start) if active and tensorboard is not None else None
        self._bar = tqdm(
            total=total, initial=start, unit="step", disable=not active, ncols=100, file=sys.stderr,
            mininterval=1 if sys.stderr.isatty() else 15,  # a log file should not fill with bars
        )  # fmt: skip
        if self._path is not None:
            if start and self._path.exists():
                self.rows = [row for row in _rows(self._path) if row["iteration"] <= start]
            self._path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def log(self, row: dict[str, Any]) -> None:
        """Write one row; it has an ``iteration``. None stands for what could not be computed, and NaN."""
        if not self._active:
            return
        row = {name: as_json(value) for name, value in row.items()}
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if self._board is not None:
            for name, value in row.items():
                if name != "iteration" and value is not None:
                    self._board.add_scalar(name, value, row["iteration"])

    def progress(self, loss: float, tokens_per_second: float) -> None:
        """One more step is done."""
        self._bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
        self._bar.update()

    def say(self, text: str) -> None:
        """A line of its own above the bar."""
        if self._active:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Finish the bar and the files."""
        self._bar.close()
        if self._board is not None:
            self._board.close()


def as_json(value: Any) -> Any:
    """``value``, or None in place of a float that JSON does not have: infinities and NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of a file whose last one a crash may have cut."""
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _summary_writer(folder: Path, start: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # an extra that is not installed
        return None
    return SummaryWriter(str(folder), purge_step=start + 1)
