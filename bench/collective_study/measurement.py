"""A measured collective: one record from the measuring loop to the tables, the fits, the answers and the files.

The JSON of bench.collectives, which bench.study --only fit reads, has a `Measurement` in each row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

from bench.timing.sampling import FEWEST as FEWEST

#: the words for the signs of `Measurement.signs`
SIGNS = {
    "~": "measured in another state only",
    "?": f"fewer than {FEWEST} calls, so no interval",
    "*": "the time was up before there were 20 calls whose median was known well enough",
}

#: the fields that each row of a file has, perhaps as null
ALWAYS = ("ci", "state")


class SeriesKey(NamedTuple):
    """The fields that tell measurements of one size apart. None: older files lack it, or the caller leaves it out.

    Measurements of one way at several sizes are a series, and a line of a picture.
    """

    operation: str
    ranks: int | None
    transport: str | None
    group: str | None = None
    dtype: str | None = None
    redop: str | None = None
    root: int | None = None
    in_place: bool | None = None
    stream: bool | None = None
    state: Any = None
    skew: str | None = None
    buffers: str | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One call, by one transport, in one state of the machine. A key that an older file lacks is None.

    Of the call: operation, transport, group (world, tensor or data), ranks (of that group), dtype, redop ("none" if
    nothing is reduced), root (-1 if there is none), in_place, bytes and count (nccl-tests'); skew of an operation with
    numbers of rows (bench/transports/skew.py); buffers: their kind, None for "same"
    (bench/transports/in_process.py); stream in older files.

    Of the times: iterations; converged (false: the time was up); seconds {p50, p95, p99, min, max, mean} on the slowest
    rank; ci [low, high] of the median (null of fewer than six calls); algbw and busbw of the median in bytes per
    second. wrong: the wrong elements of all ranks. overlap {communication, compute, overall in seconds, percent} of the
    transport stream, with --overlap. start_skew: {p50, max} of the seconds between the first and the last rank's start
    of a call, and the uncertainty of the clocks; late: calls that were not counted because between nodes a rank began
    late (bench/timing/starting.py).

    Of the machine (bench/timing/states.py): state, a number while it is measured, and then a name if there was more
    than one; disturbed, of another state than those that are shown. A study keeps the number as state_seen, and the
    size that it asked for as asked_bytes.

    With --over: over, the median over that of the other transport, and over_sign, "*" if one of them did not converge.
    """

    #: for who reads a file: the types are as they say, and numbers are finite
    __pydantic_config__: ClassVar[dict[str, bool]] = {"strict": True, "allow_inf_nan": False}

    operation: str
    transport: str
    group: str | None = None
    ranks: int
    dtype: str | None = None
    redop: str | None = None
    root: int | None = None
    in_place: bool | None = None
    bytes: int
    count: int | None = None
    skew: str | None = None
    buffers: str | None = None
    stream: bool | None = None
    iterations: int | None = None
    converged: bool | None = None
    seconds: dict[str, float]
    ci: tuple[float, float] | None = None
    algbw: float | None = None
    busbw: float | None = None
    wrong: int | None = None
    overlap: dict[str, float] | None = None
    late: int | None = None
    start_skew: dict[str, float] | None = None
    state: int | str | None = None
    state_seen: int | None = None
    asked_bytes: int | None = None
    disturbed: bool | None = None
    over: float | None = None
    over_sign: str | None = None

    def but(self, **changed: Any) -> Measurement:
        """The same with other values of some fields."""
        return replace(self, **changed)

    def to_json(self) -> dict[str, Any]:
        """The row of a file: the fields that it has, and those of ALWAYS."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in found.items() if value is not None or name in ALWAYS}

    @property
    def p50(self) -> float:
        """The median in seconds."""
        return self.seconds["p50"]

    @property
    def calls(self) -> int:
        """The calls that were counted; 0 if an older file does not say it."""
        return self.iterations or 0

    @property
    def key(self) -> SeriesKey:
        """The fields that tell it apart from others of its size."""
        return SeriesKey(**{name: getattr(self, name) for name in SeriesKey._fields})

    @property
    def call(self) -> tuple[SeriesKey, int]:
        """What was measured, in whichever state of the machine."""
        return self.key._replace(state=None), self.bytes

    @property
    def interval_percent(self) -> float:
        """Half the confidence interval of the median, in percent of the median; infinity without an interval."""
        return math.inf if self.ci is None else 50 * (self.ci[1] - self.ci[0]) / self.p50

    @property
    def has_few_calls(self) -> bool:
        """Whether it says that its calls are too few for an interval."""
        return self.iterations is not None and self.iterations < FEWEST

    @property
    def why_not(self) -> str:
        """Why it enters no comparison, fit or model; "" if it may. None says nothing against it."""
        if self.wrong:
            return f"{self.wrong} wrong values"
        if self.disturbed:
            return SIGNS["~"]
        if self.has_few_calls:
            return f"{self.iterations} calls, and an interval needs {FEWEST}"
        return ""

    @property
    def signs(self) -> str:
        """Its signs, if it does not count or did not converge: keys of SIGNS."""
        late = not self.has_few_calls and self.converged is False
        return ("~" if self.disturbed else "") + ("?" if self.has_few_calls else "") + ("*" if late else "")


def comparable(rows: Iterable[Measurement]) -> list[Measurement]:
    """Those that may be compared (`Measurement.why_not`)."""
    return [row for row in rows if not row.why_not]
