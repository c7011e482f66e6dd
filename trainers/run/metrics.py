"""The records of a run while it runs, on rank 0 only: metrics.jsonl, TensorBoard, the progress bar."""

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

    folder: the folder of the rows; None writes none. start: the iteration at which the run begins. Rows of later
    iterations are dropped: an earlier run left them that went further than its last checkpoint. total: the iteration at
    which the run ends. active: False on all ranks but 0; then nothing is written.
    """

    def __init__(self, folder: Path | None, start: int, total: int, *, tensorboard: Path | None, active: bool) -> None:
        self.rows: list[dict[str, Any]] = []
        self._active = active
        self._path = folder / "metrics.jsonl" if folder is not None and active else None
        self._board = _summary_writer(tensorboard, start) if active and tensorboard is not None else None
        self._bar = tqdm(
            total=total, initial=start, unit="step", disable=not active, ncols=100, file=sys.stderr,
            mininterval=1 if sys.stderr.isatty() else 15,  # so that a log file does not fill with bars
        )  # fmt: skip
        if self._path is not None:
            if start and self._path.exists():
                self.rows = [row for row in _rows(self._path) if row["iteration"] <= start]
            self._path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def log(self, row: dict[str, Any]) -> None:
        """Write one row, which has an ``iteration``. A value that is None, infinite or NaN is written as null."""
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
        """Advance the bar by one step."""
        self._bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
        self._bar.update()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._active:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Finish the bar and the files."""
        self._bar.close()
        if self._board is not None:
            self._board.close()


def as_json(value: Any) -> Any:
    """``value``, or None for infinities and NaN, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The complete rows of a file. A crash may have cut its last row."""
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _summary_writer(folder: Path, start: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # TensorBoard is an extra, and not installed
        return None
    return SummaryWriter(str(folder), purge_step=start + 1)
