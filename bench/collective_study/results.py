"""Read and check the results of bench.collectives: one `Series` for each way to run an operation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

from commengine import UsageError
from trainers.files.reading import InputFileError, read_json
from trainers.files.schema import FilePart, checked, fault_in

FORMAT = 1
NORMAL_95 = 1.96  # half a 95% interval in standard errors
STATISTICS = ("p50", "mean", "min")
#: the fields that distinguish measurements of one operation, besides the size
KEY = ("operation", "ranks", "transport", "group", "dtype", "redop", "root", "in_place", "stream", "state", "skew")


_NotNegative = Annotated[float, Field(ge=0)]


class _Row(FilePart):
    """The part of a row that a fit needs, beside the fields in KEY."""

    model_config = ConfigDict(extra="ignore")

    operation: str
    transport: str
    ranks: Annotated[int, Field(ge=1)]
    bytes: _NotNegative
    seconds: dict[str, float]
    ci: tuple[_NotNegative, _NotNegative] | None = None
    wrong: int | None = None
    disturbed: bool | None = None


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
        parts = [str(self.key[name]) for name in ("transport", "group", "dtype", "redop", "skew") if self.key.get(name)]
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
    for number, one in enumerate(data["rows"]):
        with fault_in(f"{path}: rows[{number}]"):
            row = checked(_Row, one)
            spent = row.seconds[statistic]
            low, high = row.ci or (spent, spent)
            if spent <= 0:
                raise ValueError(f"seconds.{statistic}={spent}: a time is above 0")
            if high < low:
                raise ValueError(f"ci={[low, high]}: the low end is above the high end")
            if row.wrong:
                raise ValueError(f"{row.operation} of {row.bytes:g} bytes had {row.wrong} wrong values: not a time")
            point = row.bytes, spent, (high - low) / 2 / NORMAL_95 / spent, bool(row.disturbed)
            key = {name: one.get(name) for name in KEY}
            found.setdefault(json.dumps(key), (key, []))[1].append(point)
    return [_series(key, points) for key, points in found.values()], {k: v for k, v in data.items() if k != "rows"}


def _series(key: dict[str, Any], points: list[tuple[float, float, float, bool]]) -> Series:
    columns = np.array([point[:3] for point in sorted(points)]).T
    return Series(key, columns[0], columns[1], columns[2], frozenset(point[0] for point in points if point[3]))
