"""Switch points: the sizes from which on a collective of host tensors goes through a node's memory, as measured.

``bench.collectives --only switch-points`` measures them, prints them beside the times, and writes a file that
`SwitchPoints.load` reads: ``Communicator(..., switch_points=SwitchPoints.load("here.json"))``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from commengine.dtypes import HALF_TYPES
from commengine.errors import CollectiveError
from commengine.mpi import load_mpi
from commengine.shared_memory.flags import IN_MEMORY, REDUCING_IN_MEMORY

NEVER = float("inf")

#: the operations that have a way through memory, and those of them that reduce
REDUCING = REDUCING_IN_MEMORY
OPERATIONS = IN_MEMORY

#: "half": float16 and bfloat16, which MPI does not reduce itself; "full": the other dtypes, and every dtype of the
#: operations that only move data
KINDS = ("full", "half")


class Point(NamedTuple):
    """The sizes of the whole tensor, in bytes, from which on each route is taken; NEVER for a route never taken.

    window: read and write tensors of `Communicator.empty` in place.
    bounce: copy private tensors through slots that the ranks of the node share.
    two_level: in a group that spans nodes, reduce inside each node first (in place or through slots, as the tensor
        lies), and then between nodes, with one rank of each node for each slice of the tensor.
    """

    window: float = NEVER
    bounce: float = NEVER
    two_level: float = NEVER


class Key(NamedTuple):
    """A row's operation, kind of dtype (`KINDS`), and the least number of the group's ranks on a node."""

    operation: str
    kind: str
    ranks: int


#: where Linux tells the processor's maker
PROCESSORS = Path("/proc/cpuinfo")

#: the tables that come with the package: the first was measured on processors of AMD with 2 and 4 ranks, the second on
#: Intel's with 2. The second has empty rows of 3, because MPI runs all that was not measured there. On other processors
#: the second is taken, because it leaves more sizes to MPI
AMD, OTHERS = (Path(__file__).with_name(f"switch_points_{maker}.json") for maker in ("amd", "intel"))


def of_this_processor() -> Path:
    """Return the table that was measured on processors like this one."""
    try:
        by_amd = "AuthenticAMD" in PROCESSORS.read_text()
    except OSError:
        by_amd = False
    return AMD if by_amd else OTHERS


def kind_of(operation: str, dtype: torch.dtype) -> str:
    """Return which of `KINDS` a tensor of an operation is."""
    return "half" if operation in REDUCING and dtype in HALF_TYPES else "full"


@dataclass(frozen=True)
class SwitchPoints:
    """A table of switch points. Every rank needs the same table. Nothing here is collective.

    rows: the sizes, in bytes, of each operation, kind of dtype and number of ranks. A row serves up to twice as many
    ranks, if there is no nearer one; beyond, MPI runs all.
    """

    rows: Mapping[Key, Point]

    def point(self, operation: str, dtype: torch.dtype, ranks: int) -> Point:
        """Return the row for ``ranks`` ranks on a node: the row with the most ranks that are not more than these.

        All is NEVER if there is none, or if it has fewer than half of these.
        """
        return self._row(operation, kind_of(operation, dtype), ranks)

    def _row(self, operation: str, kind: str, ranks: int) -> Point:
        fitting = [key for key in self.rows if key[:2] == (operation, kind) and key.ranks <= ranks <= 2 * key.ranks]
        return self.rows[max(fitting)] if fitting else Point()

    def private_too(self, ranks: int, *, spanning: bool) -> bool:
        """Whether private tensors ever go through memory, with ``ranks`` ranks of a group on each node.

        spanning: the group has several nodes.
        """
        points = [self._row(operation, kind, ranks) for operation, kind in {key[:2] for key in self.rows}]
        return any((point.two_level if spanning else point.bounce) < NEVER for point in points)

    @property
    def least(self) -> float:
        """The size in bytes below which nothing goes through memory."""
        return min((value for point in self.rows.values() for value in point), default=NEVER)

    def least_of(self, operation: str, kind: str, *, windows: bool) -> float:
        """The same for one operation and kind of dtype. windows: tensors in windows count, too."""
        rows = (point for key, point in self.rows.items() if key[:2] == (operation, kind))
        return min((min(point if windows else point[1:]) for point in rows), default=NEVER)

    @property
    def digest(self) -> int:
        """A checksum: equal for equal tables, on any rank."""
        return zlib.crc32(json.dumps(sorted((*key, *map(float, point)) for key, point in self.rows.items())).encode())

    def save(self, path: Path) -> None:
        """Write a JSON file that `load` reads. Raises OSError if it cannot be written."""
        rows = [
            key._asdict() | {way: nbytes for way, nbytes in point._asdict().items() if nbytes != NEVER}
            for key, point in self.rows.items()
        ]
        path.write_text(json.dumps({"switch_points": rows}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str | None = None) -> SwitchPoints:
        """Read a file of switch points; without ``path``, the table of this processor's maker.

        Raises ValueError if the file cannot be read or has no such table.
        """
        path = of_this_processor() if path is None else path
        try:
            rows = json.loads(Path(path).read_text())["switch_points"]
            table = {}
            for row in rows:
                key = Key(*(row.pop(name) for name in Key._fields))
                table[key] = Point(**{way: float(value) for way, value in row.items()})
                if key.operation not in OPERATIONS or key.kind not in KINDS or not isinstance(key.ranks, int):
                    raise ValueError(f"unknown row {tuple(key)}")
        except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
            what = f"{type(error).__name__}: {str(error)[:200]}"
            where = "see bench.collectives --only switch-points"
            raise ValueError(f"{path} has no switch points ({where}): {what}") from error
        return cls(table)


def checked_digest(points: Any) -> int | None:
    """Return a number that is equal for equal tables, and None for None. Raises CollectiveError for anything else."""
    if points is not None and not isinstance(points, SwitchPoints):
        raise CollectiveError(f"switch_points={points!r} is not a SwitchPoints: SwitchPoints.load(FILE) reads one")
    return None if points is None else points.digest


def agreed(calls: Any, rank: int, points: SwitchPoints | None) -> SwitchPoints:
    """Return ``points``, which every rank has given, or the table of rank 0's processor for None.

    calls: has the blocking calls of an MPI communicator, for None, where this is collective. rank: this rank's.
    """
    if points is not None:
        return points
    told = bytearray([rank == 0 and of_this_processor() == AMD])
    calls.Bcast((told, load_mpi().BYTE), 0)
    return SwitchPoints.load(AMD if told[0] else OTHERS)
