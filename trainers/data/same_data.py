"""Whether a data set is the one that a run has read, told without reading all of it.

Three things tell: the sizes and both ends of its files (`IndexedDataset.identity`), the checksums that were written
with it, and the time of the last write. Other sizes, ends or checksums are other data. Another time is no proof,
because a copy has one, too: the user is told. Only ``--verify-data`` reads every byte.
"""

from __future__ import annotations

import filecmp
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple, Protocol, TypeVar

from .indexed import IndexedDataset, bin_path, checksums_path, idx_path

#: seconds by which a file may be newer than its checksums: one writer closes all of them at once
TOGETHER = 2.0


class Known(Protocol):
    """What is known of a data set. checksums: "" if it has none. written: in seconds since 1970; 0 if not known."""

    @property
    def name(self) -> str: ...
    @property
    def identity(self) -> str: ...
    @property
    def checksums(self) -> str: ...
    @property
    def written(self) -> int: ...


class KnownData(NamedTuple):
    """`Known` of a data set that lies on a disk."""

    name: str
    identity: str
    checksums: str
    written: int

    @classmethod
    def of(cls, dataset: IndexedDataset) -> KnownData:
        """What is known of ``dataset``. Raises ValueError where its checksums say another size."""
        return cls(dataset.prefix, dataset.identity(), dataset.checksums(), dataset.written())


One = TypeVar("One", bound=Known)


def same_data(one: Known, other: Known) -> bool:
    """Whether nothing that is known tells the data of the two apart."""
    told_apart = one.checksums != other.checksums and "" not in (one.checksums, other.checksums)
    return one.identity == other.identity and not told_apart


def found_among(one: Known, others: Iterable[One]) -> One | None:
    """The first of ``others`` with the data of ``one``, one of its name before the rest; None if there is none."""
    same = [other for other in others if same_data(one, other)]
    return min(same, key=lambda other: other.name != one.name, default=None)


def written_since(one: Known, old: Known) -> str | None:
    """A line for the user of ``one``, the same data as ``old``, if its files were written since; None if not."""
    if not (one.written and old.written) or one.written == old.written:
        return None
    then, now = (datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S") for at in (old.written, one.written))
    return (
        f"{one.name} was written at {now} UTC, and the run read what was written at {then}; sizes, ends and checksums "
        "are the same. --verify-data compares every byte with the checksums"
    )


def written_after_checksums(prefix: str) -> str | None:
    """A line for the user of a data set with a file that was written after its checksums; None of any other.

    It is no proof either: a copy writes the files in any order.
    """
    made = checksums_path(prefix)
    for path in (bin_path(prefix), idx_path(prefix)):
        if made.is_file() and path.is_file() and path.stat().st_mtime > made.stat().st_mtime + TOGETHER:
            return f"{path} was written after {made.name}. --verify-data compares every byte with the checksums"
    return None


def same_bytes(prefix: str, other: str) -> bool:
    """Whether the files of two data sets are the same. Reads them up to the first difference."""
    return all(filecmp.cmp(path(prefix), path(other), shallow=False) for path in (bin_path, idx_path))
