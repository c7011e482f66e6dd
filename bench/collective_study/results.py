"""Read and check the results of bench.collectives: one `Series` for each way to run an operation."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from commengine import UsageError
from trainers.files.reading import InputFileError, read_json

FORMAT = 1
NORMAL_95 = 1.96  # half a 95% interval in standard errors
STATISTICS = ("p50", "mean", "min")
#: the fields that distinguish measurements of one operation, besides the size
KEY = ("operation", "ranks", "transport", "group", "dtype", "redop", "root", "in_place", "stream", "state")


@dataclass(frozen=True)
class Series:
    """One operation, run in one way, at several sizes.

    key: the fields in KEY. sizes: bytes, ascending. seconds: a statistic of the times. errors: relative standard
    errors. disturbed: the sizes that were measured in another state of the machine only.
    """

    key: dict[str, Any]
    sizes: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]
    disturbed: frozenset[float] = frozenset()

    @property
    def operation(self) -> str:
        """The engine's name of the operation."""
        return str(self.key["operation"])

    @property
    def ranks(self) -> int:
        """The size of the group."""
        return int(self.key["ranks"])

    @property
    def in_place(self) -> bool:
        """Whether the result replaced the input."""
        return bool(self.key["in_place"])

    @property
    def variant(self) -> str:
        """The other fields of the key, for people."""
        parts = [str(self.key[name]) for name in ("transport", "group", "dtype", "redop") if self.key.get(name)]
        if self.key.get("in_place") is not None:
            parts.append("in place" if self.key["in_place"] else "out of place")
        stream, state = self.key.get("stream"), self.key.get("state")
        return " ".join([*parts, *(["stream"] if stream else []), *([str(state)] if state else [])])


def read(path: Path, statistic: str = "p50") -> tuple[list[Series], dict[str, Any]]:
    """The series of a results file, in the file's order, and the rest of the file. statistic: one of STATISTICS.

    Raises UsageError that names the fault.
    """
    try:
        data = read_json(path)
    except InputFileError as error:
        raise UsageError(f"{error}; want results of bench.collectives --json") from error
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        raise UsageError(f'{path}: not results of bench.collectives --json: there is no list "rows"')
    if data.get("format") != FORMAT:
        raise UsageError(f"{path}: format {data.get('format')!r}; this version reads {FORMAT}")
    found: dict[str, tuple[dict[str, Any], list[tuple[float, float, float, bool]]]] = {}
    for number, row in enumerate(data["rows"]):
        try:
            key, point = _row(row, statistic)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{path}: rows[{number}]: {what}") from error
        found.setdefault(json.dumps(key), (key, []))[1].append(point)
    return [_series(key, points) for key, points in found.values()], {k: v for k, v in data.items() if k != "rows"}


def _row(row: Any, statistic: str) -> tuple[dict[str, Any], tuple[float, float, float, bool]]:
    if not isinstance(row, dict):
        raise TypeError(f"a row is an object, not {row!r}")
    for name in ("operation", "transport"):
        if not isinstance(row[name], str):
            raise TypeError(f"{name}={row[name]!r}: a name")
    size, ranks = _number(row, "bytes"), _number(row, "ranks")
    if ranks != int(ranks) or ranks < 1:
        raise ValueError(f"ranks={row['ranks']!r}: a whole number, at least 1")
    if not isinstance(row["seconds"], dict):
        raise TypeError(f"seconds={row['seconds']!r}: an object with {statistic}, ...")
    spent = _number(row["seconds"], statistic)
    if spent <= 0:
        raise ValueError(f"seconds.{statistic}={spent}: a time is above 0")
    if row.get("wrong"):
        raise ValueError(
            f"{row['operation']} of {size:g} bytes had {row['wrong']} wrong values: its time means nothing"
        )
    error = 0.0
    if row.get("ci") is not None:
        if not isinstance(row["ci"], list) or len(row["ci"]) != 2:
            raise TypeError(f"ci={row['ci']!r}: [low, high] in seconds")
        low, high = (_number({"ci": end}, "ci") for end in row["ci"])
        if high < low:
            raise ValueError(f"ci={row['ci']}: the low end is above the high end")
        error = (high - low) / 2 / NORMAL_95 / spent
    disturbed = bool(row.get("disturbed"))
    return {name: row.get(name) for name in KEY} | {"ranks": int(ranks)}, (size, spent, error, disturbed)


def _number(row: dict[str, Any], name: str) -> float:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r}: a number, 0 or more")
    return float(value)


def _series(key: dict[str, Any], points: list[tuple[float, float, float, bool]]) -> Series:
    columns = np.array([point[:3] for point in sorted(points)]).T
    return Series(key, columns[0], columns[1], columns[2], frozenset(point[0] for point in points if point[3]))
