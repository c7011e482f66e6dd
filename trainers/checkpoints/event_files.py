"""TensorBoard's event files: shorten them to the events up to a step, with or without TensorBoard installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from . import disk

#: A record: the length of its event in 8 bytes, a checksum of these in 4, the event, a checksum of it in 4.
_BEFORE, _AFTER = 12, 4


def cut(folder: Path, last: int) -> None:
    """Remove the events of steps after ``last`` from the files in ``folder``, if there is one. Raises OSError.

    A file from which none goes is left as it is; one that a crash cut off in a record loses this record only with
    others. A kill leaves all of a file or the shorter one.
    """
    for path in sorted(folder.glob("events.out.tfevents.*")):
        records = list(_records(path.read_bytes()))
        kept = [record for record in records if _step(record[_BEFORE:-_AFTER]) <= last]
        if len(kept) == len(records):
            continue
        if any(_step(record[_BEFORE:-_AFTER]) for record in kept):
            disk.rewrite(path, b"".join(kept))
        else:
            disk.remove(path)


def _records(content: bytes) -> Iterator[bytes]:
    """The whole records of a file."""
    start = 0
    while start + _BEFORE <= len(content):
        end = start + _BEFORE + int.from_bytes(content[start : start + 8], "little") + _AFTER
        if end > len(content):
            return
        yield content[start:end]
        start = end


def _step(event: bytes) -> int:
    """The step of an event, a message of protocol buffers whose field 2 it is; 0 if it has none.

    The fields before it are the time, of 8 bytes, and nothing else: TensorBoard writes fields in their order.
    """
    at = 9 if event[:1] == b"\x09" else 0
    if event[at : at + 1] != b"\x10":
        return 0
    value = shift = 0
    for byte in event[at + 1 : at + 11]:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return value
