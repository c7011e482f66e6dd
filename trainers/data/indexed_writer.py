"""Writing an indexed data set: all of its files appear together, with their checksums, or none does."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from commengine.files import checksums

from .indexed import CODES, HEADER, MAGIC, VERSION, IndexedDataset, bin_path, checksums_path, idx_path, type_names


class IndexedDatasetWriter(contextlib.AbstractContextManager["IndexedDatasetWriter"]):
    """A writer of ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.xxh3``. The data set is complete or it does not exist.

    For a ``with`` block. Tokens are streamed to ``PREFIX.bin.tmp``. The end of the block writes all other files under
    such names, too, and then renames all of them, the index last. If ``PREFIX.idx`` exists, it therefore belongs to the
    files beside it. Nothing is done to an older data set before all bytes of the new one are on the disk. An exception
    removes the temporary files.

    dtype: an integer type of the format (uint8, int8, int16, int32, int64, uint16); see `best_dtype`. Raises ValueError
    for another type, and OSError that names the file where one cannot be written.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise ValueError(f"{prefix}: cannot store token ids as {self.dtype}; valid: {type_names()}")
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        self._list = checksums_path(prefix)
        self._beside: dict[Path, bytes] = {}
        self._stale: list[Path] = []
        self._digest = checksums.Digester(self._bin.name)
        # An array takes 4 or 8 bytes per entry, less than a list, which counts for corpora of 10^8 documents.
        self._lengths = array("i")
        self._documents = array("q", [0])
        self.num_tokens = 0
        self._file = _partial(self._bin).open("wb")  # closed by __exit__

    def __len__(self) -> int:
        """The number of documents added so far."""
        return len(self._documents) - 1

    def add_document(self, tokens: npt.ArrayLike, sentence_lengths: Sequence[int] | None = None) -> None:
        """Append one document.

        tokens: [n] integers that fit the type of the data set, n >= 1. sentence_lengths: the tokens of each sentence,
        which sum to n; None if the document is one sequence.
        """
        ids = np.asarray(tokens)
        lengths = [ids.size] if sentence_lengths is None else sentence_lengths
        data = np.ascontiguousarray(ids, self.dtype).data
        with _naming(self._bin):
            self._file.write(data)
        self._digest.update(data)
        self._lengths.extend(lengths)
        self._documents.append(len(self._lengths))
        self.num_tokens += ids.size

    def add_file(self, path: str | os.PathLike[str], content: bytes | None) -> None:
        """Write another file of the data set, such as its tokenizer, with the index. path: beside the others.

        content: None removes what an older data set has there.
        """
        if content is None:
            self._stale.append(Path(path))
        else:
            self._beside[Path(path)] = content

    def _close(self) -> None:
        """Write the other files, and rename all to their final names."""
        with _naming(self._bin):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        pieces = [*self._digest.pieces(), *_write(self._idx, self._index())]
        for path, content in self._beside.items():
            pieces += _write(path, [content])
        _write(self._list, [checksums.text(pieces).encode()])
        for path in (self._idx, *self._stale):  # the index first: it must never stand beside the new tokens
            path.unlink(missing_ok=True)
        for path in self._files():
            _partial(path).replace(path)

    def _files(self) -> list[Path]:
        return [self._bin, *self._beside, self._list, self._idx]

    def _index(self) -> Iterator[bytes | memoryview]:
        lengths = np.array(self._lengths, dtype="<i4")
        offsets = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype="<i8", out=offsets[1:])
        offsets *= self.dtype.itemsize
        documents = np.array(self._documents, dtype="<i8")
        yield HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(documents))
        yield from (part.data for part in (lengths, offsets, documents))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self._close()
        finally:
            with contextlib.suppress(OSError):  # of bytes that still wait, and that a full disk has no room for
                self._file.close()
            for path in self._files():
                _partial(path).unlink(missing_ok=True)


def write_checksums(prefix: str | os.PathLike[str]) -> int:
    """Write ``PREFIX.xxh3`` for a data set of another program. Returns the bytes that were read.

    Raises ValueError that names a file that is damaged, and OSError.
    """
    IndexedDataset(prefix)
    pieces = [*checksums.pieces_of(bin_path(prefix)), *checksums.pieces_of(idx_path(prefix))]
    _write(checksums_path(prefix), [checksums.text(pieces).encode()])
    _partial(checksums_path(prefix)).replace(checksums_path(prefix))
    return sum(piece.stop - piece.start for piece in pieces)


def _partial(path: Path) -> Path:
    return Path(f"{path}.tmp")


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the name of the file to an OSError that has none: that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> list[checksums.Piece]:
    """Write all bytes of ``path`` under its temporary name, down to the disk. Returns its checksums."""
    made = checksums.Digester(path.name)
    with _naming(path), _partial(path).open("wb") as file:
        for part in parts:
            file.write(part)
            made.update(part)
        file.flush()
        os.fsync(file.fileno())
    return made.pieces()
