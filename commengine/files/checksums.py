"""Checksums of files: a list of pieces with the XXH3 digest of each, which any number of ranks verify together.

A list is text: a heading, a line ``DIGEST START STOP NAME`` for each piece, and last the digest of all lines before it.
A digest is XXH3 of 64 bits (Collet, xxHash 0.8) as 16 hexadecimal digits. START and STOP count bytes of the file NAME,
which lies in the list's folder; the pieces of a file cover all of it. There is one spelling of a list, so that a change
of any byte of it is found as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import xxhash

HEADING = "checksums of commengine, version 1: xxh3_64, first byte, end, file"
#: the largest piece, in bytes: small enough that the ranks share the work, large enough that the list stays short
PIECE = 1 << 26
_BLOCK = 1 << 22


class ChecksumError(ValueError):
    """A file that differs from its checksums, or a damaged list. The message names the file, and the bytes."""


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` (excluded) of file ``name``, and their digest."""

    name: str
    start: int
    stop: int
    digest: str


def digest(data: bytes | memoryview) -> str:
    """XXH3 of 64 bits: 16 hexadecimal digits. data: anything that has contiguous bytes."""
    return str(xxhash.xxh3_64_hexdigest(data))


class Digester:
    """The pieces of a file whose bytes come in order, such as one that is being written. name: of the file."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pieces: list[Piece] = []
        self._start = self._stop = 0
        self._hash = xxhash.xxh3_64()

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes of the file."""
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: PIECE - (self._stop - self._start)]
            self._hash.update(part)
            self._stop += len(part)
            view = view[len(part) :]
            if self._stop - self._start == PIECE:
                self._end()

    def pieces(self) -> list[Piece]:
        """All pieces, once the file has all its bytes. An empty file has one empty piece."""
        if self._stop > self._start or not self._pieces:
            self._end()
        return self._pieces

    def _end(self) -> None:
        self._pieces.append(Piece(self._name, self._start, self._stop, self._hash.hexdigest()))
        self._start = self._stop
        self._hash = xxhash.xxh3_64()


def pieces_of(path: Path) -> list[Piece]:
    """The pieces of a file that is there. Raises OSError."""
    made = Digester(path.name)
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            made.update(block)
    return made.pieces()


def text(pieces: Iterable[Piece]) -> str:
    """The list of ``pieces``. The pieces of one file stand together, from its first byte to its last.

    Raises ValueError for a name that is a path or has a line's end in it.
    """
    lines = [HEADING]
    for piece in pieces:
        if piece.name in ("", ".", "..") or "/" in piece.name or "\n" in piece.name:
            raise ValueError(f"{piece.name!r}: not the name of a file beside its checksums")
        lines.append(f"{piece.digest} {piece.start} {piece.stop} {piece.name}")
    body = "".join(f"{line}\n" for line in lines)
    return f"{body}{digest(body.encode())}\n"


def read(path: str | os.PathLike[str]) -> list[Piece]:
    """The pieces of a list. Raises ChecksumError where the list is damaged, OSError if it cannot be read."""
    if not Path(path).is_file():  # a pipe would wait for a writer
        raise ChecksumError(f"{os.fspath(path)}: no such file")
    raw = Path(path).read_bytes()
    try:
        pieces = [_piece(line) for line in raw.decode().split("\n")[1:-2]]
        files = [list(of_one) for _, of_one in groupby(pieces, attrgetter("name"))]
        once = len(files) == len({piece.name for piece in pieces})
        whole = text(pieces).encode() == raw and once and all(map(_covers, files))
    except ValueError:
        whole = False
    if not whole:
        raise ChecksumError(f"{os.fspath(path)}: damaged: not the list of checksums that was written")
    return pieces


def verify(path: str | os.PathLike[str], pieces: Sequence[Piece], part: int = 0, parts: int = 1) -> Iterator[int]:
    """Compare files with ``pieces``, the content of the list at ``path``; yield the bytes of each piece that is right.

    part, parts: this rank reads the pieces ``part``, ``part + parts``, ... Each rank also compares the sizes of all
    files. Raises ChecksumError that names the first file that differs, or that is missing; OSError where reading fails.
    """
    folder = Path(path).parent
    for name, of_one in groupby(pieces, attrgetter("name")):
        require_size(path, folder / name, list(of_one))
    for piece in pieces[part::parts]:
        check(folder, piece)
        yield piece.stop - piece.start


def require_size(path: str | os.PathLike[str], file: Path, pieces: Sequence[Piece]) -> None:
    """Raise ChecksumError unless ``file`` is there with the size of its ``pieces``, which the list at ``path`` has."""
    if not file.is_file():
        raise ChecksumError(f"{file}: no such file; {os.fspath(path)} lists it")
    if (size := file.stat().st_size) != pieces[-1].stop:
        raise ChecksumError(f"{file}: {size} bytes, where {Path(path).name} says {pieces[-1].stop}")


def check(folder: Path, piece: Piece) -> None:
    """Raise ChecksumError unless the bytes of ``piece`` in ``folder`` have its digest."""
    if not (folder / piece.name).is_file():
        raise ChecksumError(f"{folder / piece.name}: no such file")
    made, left = xxhash.xxh3_64(), piece.stop - piece.start
    with (folder / piece.name).open("rb", buffering=0) as file:
        file.seek(piece.start)
        while left and (block := file.read(min(left, _BLOCK))):
            made.update(block)
            left -= len(block)
    if left or made.hexdigest() != piece.digest:
        raise ChecksumError(
            f"{folder / piece.name}: damaged: bytes {piece.start} to {piece.stop} do not have their checksum"
        )


def _covers(pieces: Sequence[Piece]) -> bool:
    ends = [0, *(piece.stop for piece in pieces)]
    return all(piece.start == end <= piece.stop for piece, end in zip(pieces, ends, strict=False))


def _piece(line: str) -> Piece:
    value, start, stop, name = line.split(" ", 3)
    return Piece(name, int(start), int(stop), value)
