"""A measured alpha-beta model, piecewise linear in size. bench.study writes such models, and other programs load them.

The file is JSON:

    {"format": 1,
     "collectives": {"all_reduce": [{"ranks": 2, "from_bytes": 0, "alpha": 2e-6, "beta": 1e-10}, ...], ...},
     ...}

Each operation has a list of segments. A segment holds for ``ranks`` ranks, from ``from_bytes`` bytes on (nccl-tests'
size) up to the next segment with as many ranks: there the collective takes alpha + size * beta seconds. For every
number of ranks the first segment starts at 0 bytes. An alpha may be negative where the time rises faster than the size
(lines between measured points), as long as no time is. Other keys, in the file and in a segment, are ignored. Writers
may add keys, e.g. for confidence intervals; older ones wrote "windows".
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .collectives import OPERATIONS, bus_factor

FORMAT = 1


@dataclass(frozen=True)
class Segment:
    """A stretch of sizes: from ``from_bytes`` on, a collective among ``ranks`` takes alpha + size * beta seconds."""

    ranks: int
    from_bytes: float
    alpha: float
    beta: float

    def at(self, size: float) -> float:
        """Return the time in seconds of a collective of ``size`` bytes."""
        return self.alpha + size * self.beta


@dataclass(frozen=True)
class FittedModel:
    """A measured model: for each operation its segments, sorted by ranks and size."""

    collectives: dict[str, tuple[Segment, ...]]

    def seconds(self, operation: str, size: float, ranks: int) -> float:
        """Return the time in seconds of a collective of ``size`` bytes among ``ranks``; 0 for one rank.

        If this number of ranks was not measured, the segments of the nearest measured number are scaled: alpha by the
        steps of a ring, beta by the bus factor, so that the bus bandwidth stays the same. The whole time is scaled as
        beta is if alpha is negative. Raises ValueError for an operation that was not measured.
        """
        if size < 0:
            raise ValueError(f"{operation}: a size is a number of bytes, 0 or more, not {size}")
        if ranks == 1 and operation != "p2p":
            return 0.0
        segments = self.collectives.get(operation, ())
        if not segments:
            measured = ", ".join(self.collectives) or "nothing"
            raise ValueError(f"this model was not fitted to {operation}: it has {measured}")
        nearest = min({one.ranks for one in segments}, key=lambda measured: (abs(math.log(measured / ranks)), measured))
        used = [one for one in segments if one.ranks == nearest and one.from_bytes <= size][-1]
        if operation == "p2p" or nearest == ranks:
            return used.at(size)
        bus = bus_factor(operation, ranks) / bus_factor(operation, nearest)
        steps = (ranks - 1) / (nearest - 1) if used.alpha >= 0 else bus
        return used.alpha * steps + size * used.beta * bus

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that ``load`` reads."""
        rows = {name: [asdict(one) for one in segments] for name, segments in self.collectives.items()}
        return {"format": FORMAT, "collectives": rows}

    @staticmethod
    def from_json(data: Any) -> FittedModel:
        """Return the model in ``data``, an object from JSON. Raises ValueError that names the fault."""
        if not isinstance(data, dict) or not isinstance(data.get("collectives"), dict):
            raise ValueError('a cost model is an object with "collectives": {"all_reduce": [...], ...}')
        if data.get("format", FORMAT) != FORMAT:
            raise ValueError(f"the cost model has format {data['format']}, this version reads {FORMAT}")
        return FittedModel(_operations(data["collectives"]))

    @staticmethod
    def load(path: str | Path) -> FittedModel:
        """Read a file. Raises ValueError that names the file and the fault."""
        try:
            return FittedModel.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError, OverflowError) as error:
            raise ValueError(f"{path}: {error}") from error


def _operations(data: dict[str, Any]) -> dict[str, tuple[Segment, ...]]:
    found: dict[str, tuple[Segment, ...]] = {}
    for operation, rows in data.items():
        if operation not in OPERATIONS:
            raise ValueError(f"the cost model has {operation!r}: operations are {', '.join(OPERATIONS)}")
        if not isinstance(rows, list) or not rows:
            raise ValueError(f"{operation}: a list of segments, at least one")
        segments = [_segment(operation, row) for row in rows]
        segments.sort(key=lambda one: (one.ranks, one.from_bytes))
        for ranks in {one.ranks for one in segments}:
            starts = [one.from_bytes for one in segments if one.ranks == ranks]
            if starts[0] != 0 or len(set(starts)) != len(starts):
                raise ValueError(
                    f"{operation}, {ranks} ranks: segments start at 0 bytes and at different sizes: {starts}"
                )
        found[operation] = tuple(segments)
    return found


def _segment(operation: str, row: Any) -> Segment:
    try:
        one = Segment(*(row[name] for name in ("ranks", "from_bytes", "alpha", "beta")))
        finite = all(math.isfinite(number) for number in (one.ranks, one.from_bytes, one.alpha, one.beta))
        if finite and one.ranks == int(one.ranks) >= 2 and min(one.from_bytes, one.beta, one.at(one.from_bytes)) >= 0:
            return Segment(int(one.ranks), float(one.from_bytes), float(one.alpha), float(one.beta))
    except (KeyError, TypeError):
        pass
    raise ValueError(
        f"{operation}: a segment has ranks, from_bytes, alpha and beta; it is of 2 ranks or more, and its size, "
        f"beta and all times are 0 or more, not {row}"
    )
