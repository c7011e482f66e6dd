"""From how many bytes on a collective of host tensors goes through a node's memory, as measured.

`python -m bench.switch_points` measures them, prints them beside the times, and writes a file that
`SwitchPoints.load` reads: ``Communicator(..., switch_points=SwitchPoints.load("here.json"))``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from commengine.dtypes import HALF_TYPES
from commengine.errors import CollectiveError

if TYPE_CHECKING:
    from mpi4py import MPI

NEVER = float("inf")

#: the operations that have a way through memory; those that only move have the first alone, in a window
REDUCING = ("all_reduce", "reduce_scatter")
OPERATIONS = (*REDUCING, "all_gather", "broadcast")

#: the dtypes that MPI reduces itself, and the halves, which it does not; what only moves knows "full" alone
KINDS = ("full", "half")


class Point(NamedTuple):
    """Bytes of the whole tensor from which each way is taken; NEVER for one that is not.

    window: reading and writing tensors of `Communicator.empty`. bounce: copying others through slots that the ranks
    of the node share. two_level: in a group that spans nodes, reducing inside each node first (either way, as the
    tensor lies) and then between nodes; with one rank of each node per slice.
    """

    window: float = NEVER
    bounce: float = NEVER
    two_level: float = NEVER


class Key(NamedTuple):
    """operation, kind of dtype, and the ranks of the group on a node: used from these on up to the next row."""

    operation: str
    kind: str
    ranks: int


#: what bench.switch_points measured, on the machine of bench/results/switch_points-*.md
MEASURED = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class SwitchPoints:
    """A table of switch points. The same on every rank."""

    rows: Mapping[Key, Point]

    def point(self, operation: str, dtype: torch.dtype, ranks: int) -> Point:
        """The row of the most ranks that are not more than ``ranks``."""
        kind = "half" if operation in REDUCING and dtype in HALF_TYPES else "full"
        fitting = [key for key in self.rows if key[:2] == (operation, kind) and key.ranks <= ranks]
        return self.rows[max(fitting)] if fitting else Point()

    def private_too(self, ranks: int, *, spanning: bool) -> bool:
        """Whether any tensor outside of windows goes through memory, with so many ranks of a group on each node."""
        points = [point for key, point in self.rows.items() if key.ranks <= ranks]
        return any((point.two_level if spanning else point.bounce) < NEVER for point in points)

    @property
    def least(self) -> float:
        """Bytes below which nothing goes through memory."""
        return min((value for point in self.rows.values() for value in point), default=NEVER)

    @property
    def digest(self) -> int:
        """Equal for equal tables, on any rank."""
        return zlib.crc32(json.dumps(sorted((*key, *map(float, point)) for key, point in self.rows.items())).encode())

    def save(self, path: Path) -> None:
        """Write what `load` reads."""
        rows = [
            key._asdict() | {way: nbytes for way, nbytes in point._asdict().items() if nbytes != NEVER}
            for key, point in self.rows.items()
        ]
        path.write_text(json.dumps({"switch_points": rows}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str = MEASURED) -> SwitchPoints:
        """Read a file of bench.switch_points, or the one that comes with this. Raises ValueError where it is none."""
        try:
            rows = json.loads(Path(path).read_text())["switch_points"]
            table = {}
            for row in rows:
                key = Key(*(row.pop(name) for name in Key._fields))
                table[key] = Point(**{way: float(value) for way, value in row.items()})
                if key.operation not in OPERATIONS or key.kind not in KINDS or not isinstance(key.ranks, int):
                    raise ValueError(f"unknown row {tuple(key)}")
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} has no switch points (see bench.switch_points --json): {error!r}") from error
        return cls(table)


def agreed(comm: MPI.Intracomm, points: SwitchPoints | None) -> SwitchPoints:
    """``points``, or those measured. Collective; CollectiveError on every rank where two have different ones."""
    points = SwitchPoints.load() if points is None else points
    if not isinstance(points, SwitchPoints):
        raise CollectiveError(f"switch_points={points!r} is not a SwitchPoints: SwitchPoints.load(FILE) reads one")
    digests = set(comm.allgather(points.digest))
    if len(digests) > 1:
        raise CollectiveError("switch_points: the ranks have different tables; give every rank the same")
    return points
