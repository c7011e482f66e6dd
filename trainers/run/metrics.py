"""The records of a run while it runs, on rank 0 only: metrics.jsonl, TensorBoard, progress bar, the step under way."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from trainers.checkpoints import disk
from trainers.checks.digests import LAYOUT, SUFFIX

#: 1 in the row of an evaluation that a run has only because it stopped there; such a row is never the best one
AT_STOP = "at_stop"


class Metrics:
    """Rows of ``SAVE/metrics.jsonl``, scalars for TensorBoard, and a progress bar on standard error.

    folder: the folder of the rows; None writes none. start: the iteration at which the run begins, up to which there
    are rows (`trainers.checkpoints.history`); at 0 older ones are replaced. Damaged rows are dropped and named; but a
    last row that is cut off, as a crash leaves it, is not worth a word. total: the iteration at which the run ends.
    active: False on all ranks but 0; then nothing is written.
    """

    def __init__(self, folder: Path | None, start: int, total: int, *, tensorboard: Path | None, active: bool) -> None:
        self.rows: list[dict[str, Any]] = []
        self._active = active
        self._problem: str | None = None
        self._path = folder / "metrics.jsonl" if folder is not None and active else None
        self._board: _Board | None = None
        if active and tensorboard is not None:
            with contextlib.suppress(ImportError):  # TensorBoard is an extra, and not installed
                self._board = _Board(tensorboard, start)
        self._bar = progress_bar(total, "step", active=active, initial=start)
        if self._path is not None:
            damaged: list[int] = []
            if start and self._path.is_file():
                self.rows, damaged = read_rows(self._path)
            write_rows(self._path, self.rows)
            if damaged:
                self.say(left_out_text(self._path, damaged))

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
            try:
                self._board.add(row)
            except OSError:
                self.say(f"{self._board.folder}: TensorBoard's files cannot be written; the run goes on without them")
                self._board = None

    def problem(self) -> str | None:
        """Why a row could not be written, or None."""
        return self._problem

    def has(self, iteration: int, name: str) -> bool:
        """Whether there is a row of this iteration with this value. False on all ranks but 0."""
        return any(row["iteration"] == iteration and name in row for row in self.rows)

    def best(
        self, name: str, before: int | None = None, among: Container[int] | None = None
    ) -> tuple[float, int] | None:
        """The largest value of ``name``, and the first iteration that has it. None if no row has a value.

        Rows with AT_STOP are left out. before: look at rows of earlier iterations only. among: and at these
        iterations only. Always None on all ranks but 0.
        """
        rows = [row for row in self.rows if row.get(name) is not None and not row.get(AT_STOP)]
        found = [row for row in rows if before is None or row["iteration"] < before]
        found = [row for row in found if among is None or row["iteration"] in among]
        best = max(found, key=lambda row: (row[name], -row["iteration"]), default=None)
        return None if best is None else (best[name], best["iteration"])

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


def progress_bar(
    total: int, unit: str, *, active: bool, initial: int = 0, title: str | None = None
) -> tqdm[NoReturn]:  # fmt: skip
    """A progress bar on standard error, if it is ``active``. It is seldom drawn in a log file, which it would fill."""
    return tqdm(
        total=total, initial=initial, unit=unit, desc=title, disable=not active, ncols=100, file=sys.stderr,
        mininterval=1 if sys.stderr.isatty() else 15,
    )  # fmt: skip


def left_out_text(path: Path, lines: Sequence[int]) -> str:
    """The sentence about damaged rows of a file, by the numbers of their lines, that are left out."""
    shown = ", ".join(map(str, lines[:8])) + (", ..." if len(lines) > 8 else "")
    return f"{path}: {len(lines)} damaged rows are left out (lines {shown})"


def as_json(value: Any) -> Any:
    """``value``, or None for infinities and NaN, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows of a metrics.jsonl, and the numbers of the lines that are none. Raises OSError.

    A row is an object of numbers and nulls with a whole, positive ``iteration``. A last line without its end, as a
    crash leaves it, counts as neither.
    """
    found = [_row(line) for line in path.read_bytes().split(b"\n")]
    return [row for row in found if row is not None], [n for n, row in enumerate(found[:-1], 1) if row is None]


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
    """A file of TensorBoard's in ``folder``, which is written at once. It raises OSError where it cannot be written."""

    def __init__(self, folder: Path, start: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.folder, self._event, self._summary = folder, Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter((folder / name).open("wb"))
        self._write(file_version="brain.Event:2")
        self._write(step=start + 1, session_log=SessionLog(status=SessionLog.START))  # it hides later rows of before

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()

    def add(self, row: Mapping[str, Any]) -> None:
        # A digest has no curve, and neither has the layout.
        hidden = ("iteration", AT_STOP, *LAYOUT)
        shown = {name: value for name, value in row.items() if name not in hidden and not name.endswith(SUFFIX)}
        values = [{"tag": name, "simple_value": value} for name, value in shown.items() if value is not None]
        self._write(step=row["iteration"], summary=self._summary(value=values))

    def close(self) -> None:
        self._records.close()


class StepFile:
    """A file that holds the number of the last step that has begun. It costs a few microseconds a step.

    path: None for no file. The number outlives a crash of the process. It may be lost with the host, because nothing
    waits for the disk. A file that cannot be written is left out, because training does not depend on it.
    """

    def __init__(self, path: Path | None) -> None:
        self._handle: int | None = None
        if path is not None:
            with contextlib.suppress(OSError):
                self._handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)

    def begin(self, step: int) -> None:
        """Write that ``step``, from 1, begins."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._handle, b"%-20d\n" % step, 0)

    def close(self) -> None:
        """Close the file, which stays."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
