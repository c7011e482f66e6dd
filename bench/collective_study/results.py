"""Read and check the results of bench.collectives: one `Series` for each way to run an operation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from bench.collective_study.measurement import Measurement, SeriesKey
from bench.timing.sampling import half_in_errors
from commengine import UsageError
from commengine.files.reading import InputFileError, fault_in, read_json
from commengine.files.schema import told

FORMAT = 1
STATISTICS = ("p50", "mean", "min")
_ROW = TypeAdapter(Measurement)


@dataclass(frozen=True)
class LeftOut:
    """A row that does not count: its bytes, the statistic of its times, and why (`Measurement.why_not`)."""

    size: float
    seconds: float
    why: str


@dataclass(frozen=True)
class Series:
    """One operation, run in one way, at several sizes.

    key: all of them have it. sizes: bytes, ascending. seconds: a statistic of the times. errors: relative standard
    errors. calls: of all rows. unconverged: how many rows did not converge. left_out: the rows that do not count, which
    are in none of the others.
    """

    key: SeriesKey
    sizes: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]
    calls: int = 0
    unconverged: int = 0
    left_out: tuple[LeftOut, ...] = ()

    @property
    def operation(self) -> str:
        """The engine's name of the operation."""
        return self.key.operation

    @property
    def ranks(self) -> int:
        """The size of the group."""
        return int(self.key.ranks or 0)

    @property
    def in_place(self) -> bool:
        """Whether the result replaced the input."""
        return bool(self.key.in_place)

    @property
    def variant(self) -> str:
        """The other fields of the key, for people."""
        way = self.key
        parts = [one for one in (way.transport, way.group, way.dtype, way.redop, way.skew) if one]
        if way.in_place is not None:
            parts.append("in place" if way.in_place else "out of place")
        parts += [f"{way.buffers} buffers"] if way.buffers else []
        return " ".join([*parts, *(["stream"] if way.stream else []), *([str(way.state)] if way.state else [])])


def measurement_of(row: Any) -> Measurement:
    """A row of a file. Raises ValueError that names the first key at fault, and its value."""
    try:
        found = _ROW.validate_json(json.dumps(row))
    except ValidationError as error:
        raise ValueError(told(error)) from None
    low = found.ci or (0.0, 0.0)
    for name, value, least in (("ranks", found.ranks, 1), ("bytes", found.bytes, 0), ("iterations", found.calls, 0),
                               ("ci", min(low), 0)):  # fmt: skip
        if value < least:
            raise ValueError(f"{name}={value}: should be greater than or equal to {least}")
    return found


def measurements(rows: Iterable[Any]) -> list[Measurement]:
    """The rows of a file. Raises ValueError that names the first row at fault and its key."""
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(measurement_of(row))
        except ValueError as error:
            raise ValueError(f"rows[{number}]: {error}") from None
    return found


def read(path: Path, statistic: str = "p50") -> tuple[list[Series], dict[str, Any]]:
    """The series of a results file, in the file's order, and the rest of the file. statistic: one of STATISTICS.

    A series has the rows that may be compared (`Measurement.why_not`), and names the others.

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
    found: dict[SeriesKey, list[tuple[Measurement, float]]] = {}
    for number, one in enumerate(data["rows"]):
        with fault_in(f"{path}: rows[{number}]"):
            row = measurement_of(one)
            spent = row.seconds[statistic]
            low, high = row.ci or (spent, spent)
            if spent <= 0:
                raise ValueError(f"seconds.{statistic}={spent}: a time is above 0")
            if high < low:
                raise ValueError(f"ci={[low, high]}: the low end is above the high end")
            if row.wrong:
                raise ValueError(f"{row.operation} of {row.bytes:g} bytes had {row.wrong} wrong values: not a time")
            found.setdefault(row.key, []).append((row, spent))
    return [_series(way, rows) for way, rows in found.items()], {k: v for k, v in data.items() if k != "rows"}


def _series(way: SeriesKey, rows: list[tuple[Measurement, float]]) -> Series:
    left_out = [LeftOut(row.bytes, spent, row.why_not) for row, spent in rows if row.why_not]
    used = sorted(((row, spent) for row, spent in rows if not row.why_not), key=lambda pair: (pair[0].bytes, pair[1]))
    errors = np.array([_error(row, spent) for row, spent in used], dtype=np.float64)
    if len(known := errors[~np.isnan(errors)]) < len(errors):  # older files lack some: as well known as the others
        errors = np.where(np.isnan(errors), np.median(known) if len(known) else 0.0, errors)
    return Series(
        way, np.array([row.bytes for row, _ in used], dtype=np.float64),
        np.array([spent for _, spent in used], dtype=np.float64), errors,
        sum(row.iterations or 1 for row, _ in used), sum(row.converged is False for row, _ in used), tuple(left_out),
    )  # fmt: skip


def _error(row: Measurement, spent: float) -> float:
    """The relative standard error of a row's time; not a number without an interval."""
    half = half_in_errors(row.iterations or 0)
    return math.nan if row.ci is None else (row.ci[1] - row.ci[0]) / 2 / half / spent
