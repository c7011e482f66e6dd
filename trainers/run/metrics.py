"""The records of a run while it runs, on rank 0 only: metrics.jsonl, TensorBoard, the progress bar."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainers.checkpoints import disk
from trainers.checks.digests import LAYOUT, SUFFIX

#: seconds after which TensorBoard writes, and those that it may take to write what is left at the end
FLUSH_SECONDS, CLOSE_SECONDS = 120, 10.0

#: 1 in the row of an evaluation that a run has only because it stopped there; such a row is never the best one
AT_STOP = "at_stop"


class Metrics:
    """Rows of ``SAVE/metrics.jsonl``, scalars for TensorBoard, and a progress bar on standard error.

    folder: the folder of the rows; None writes none. start: the iteration at which the run begins. Rows of later
    iterations are dropped: an earlier run left them that went further than its last checkpoint. Damaged rows are
    dropped, too, and named; but a last row that is cut off, as a crash leaves it, is not worth a word. total: the
    iteration at which the run ends. active: False on all ranks but 0; then nothing is written.
    """

    def __init__(self, folder: Path | None, start: int, total: int, *, tensorboard: Path | None, active: bool) -> None:
        self.rows: list[dict[str, Any]] = []
        self._active = active
        self._problem: str | None = None
        self._path = folder / "metrics.jsonl" if folder is not None and active else None
        self._board = _board(tensorboard, start) if active and tensorboard is not None else None
        self._bar = tqdm(
            total=total, initial=start, unit="step", disable=not active, ncols=100, file=sys.stderr,
            mininterval=1 if sys.stderr.isatty() else 15,  # so that a log file does not fill with bars
        )  # fmt: skip
        if self._path is not None:
            damaged: list[int] = []
            if start and self._path.is_file():
                every, damaged = read_rows(self._path)
                self.rows = [row for row in every if row["iteration"] <= start]
            write_rows(self._path, self.rows)
            if damaged:
                shown = ", ".join(map(str, damaged[:8])) + (", ..." if len(damaged) > 8 else "")
                self.say(f"{self._path}: {len(damaged)} damaged rows are left out (lines {shown})")

    def log(self, row: dict[str, Any]) -> None:
        """Write one row: an ``iteration`` and numbers. A value that is None, infinite or NaN is written as null.

        An error of writing is kept for `problem`.
        """
        if not self._active:
            return
        row = {name: as_json(value) for name, value in row.items()}
        self.rows.append(row)
        if self._path is not None:
            try:
                with self._path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                self._problem = f"{self._path} cannot be written: {error.strerror}; the last checkpoint is as it was"
        if self._board is not None:
            self._board.add(row)
            if self._board.failed:
                self.say(f"{self._board.folder}: TensorBoard's files cannot be written; the run goes on without them")
                self._board = None

    def problem(self) -> str | None:
        """Why a row could not be written, or None."""
        return self._problem

    def has(self, iteration: int, name: str) -> bool:
        """Whether there is a row of this iteration with this value. False on all ranks but 0."""
        return any(row["iteration"] == iteration and name in row for row in self.rows)

    def best(self, name: str, before: int | None = None) -> tuple[float, int] | None:
        """The largest value of ``name``, and the first iteration that has it. None if no row has a value.

        Rows with AT_STOP are left out. before: look at rows of earlier iterations only. Always None on all ranks but 0.
        """
        found = [
            (row[name], -row["iteration"])
            for row in self.rows
            if row.get(name) is not None and not row.get(AT_STOP) and (before is None or row["iteration"] < before)
        ]
        if not found:
            return None
        value, iteration = max(found)
        return value, -iteration

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
            self._board = None


def as_json(value: Any) -> Any:
    """``value``, or None for infinities and NaN, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows of a metrics.jsonl, and the numbers of the lines that are none. Raises OSError.

    A row is an object of numbers and nulls with a whole, positive ``iteration``. A last line without its end, as a
    crash leaves it, counts as neither.
    """
    rows, damaged = [], []
    *lines, last = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is None:
            damaged.append(number)
        else:
            rows.append(row)
    if (row := _row(last)) is not None:
        rows.append(row)
    return rows, damaged


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # an encoding that is not UTF-8 is a ValueError, too
        return None
    if not isinstance(row, dict) or type(row.get("iteration")) is not int or row["iteration"] < 1:
        return None
    return row if all(value is None or _is_number(value) for value in row.values()) else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf and (type(value) is float or abs(value) < 2**63)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Give ``path`` new rows: a kill leaves all the old ones or all the new ones. Raises OSError."""
    disk.rewrite(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


class _Board:
    """TensorBoard's files in ``folder``. They are not worth a run: an error of writing only sets ``failed``.

    TensorBoard writes in a thread of its own. An error ends that thread, and from then on its other functions wait for
    it for ever.
    """

    def __init__(self, writer: Callable[[], Any], folder: Path) -> None:
        before = set(threading.enumerate())
        self.folder = folder
        self._writer = writer()
        self._threads = set(threading.enumerate()) - before

    @property
    def failed(self) -> bool:
        return not all(thread.is_alive() for thread in self._threads)

    def add(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            # A digest has no curve, and neither has the layout.
            shown = name not in ("iteration", AT_STOP, *LAYOUT) and not name.endswith(SUFFIX)
            if shown and value is not None and not self.failed:
                self._writer.add_scalar(name, value, row["iteration"])

    def close(self) -> None:
        if not self.failed:  # in a thread, because it fails in the last write, too
            closing = threading.Thread(target=self._writer.close, name="TensorBoard's end", daemon=True)
            closing.start()
            closing.join(CLOSE_SECONDS)


def _board(folder: Path, start: int) -> _Board | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # TensorBoard is an extra, and not installed
        return None
    return _Board(lambda: SummaryWriter(str(folder), purge_step=start + 1, flush_secs=FLUSH_SECONDS), folder)
