"""OwnedDocuments: the documents whose hashes a rank owns; and the file on disk that holds them.

Their texts are on disk, because they are more than a rank's memory holds; about 130 bytes of each are in memory.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commengine import Communicator
from commengine.rank_zero import on_every_rank
from trainers.data.text_files import AsWritten

from .documents import EXAMPLES, Document, StageCount, text_hash
from .exchange import Numbering, exchange, split_by

Array = NDArray[Any]


class SpillFile:
    """Bytes that are appended, and then read at any place. The file has no name: it is gone when the process ends.

    Raises OSError, which names the folder, if the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, tempfile.TemporaryFile(dir=folder)  # noqa: SIM115

    def append(self, data: bytes | Array) -> int:
        """Append ``data``; return the offset of its first byte."""
        offset = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(data if isinstance(data, bytes) else data.tobytes())
            self._file.flush()
        except OSError as error:
            raise OSError(f"--work-dir {self._folder}: {error.strerror}") from error
        return offset

    def read(self, offset: int, length: int) -> bytes:
        """The ``length`` bytes at ``offset``."""
        self._file.seek(offset)
        data = self._file.read(length)
        if len(data) < length:
            raise OSError(f"--work-dir {self._folder}: a spilled file ended early")
        return data

    def close(self) -> None:
        """Give the disk's space back."""
        self._file.close()


def row_line(row: dict[str, Any]) -> bytes:
    """A row as a line of JSON, newline included. A value that is `AsWritten` stays so."""

    def line(*, ascii: bool) -> bytes:
        pairs = (
            (json.dumps(key, ensure_ascii=ascii), one)
            if isinstance(one, AsWritten)
            else (json.dumps(key, ensure_ascii=ascii), json.dumps(one, ensure_ascii=ascii))
            for key, one in row.items()
        )
        return f"{{{', '.join(f'{key}: {value}' for key, value in pairs)}}}\n".encode()

    try:
        return line(ascii=False)
    except UnicodeEncodeError:  # a key spells half of a surrogate pair
        return line(ascii=True)


def chunks(sizes: Array, limit: int) -> Iterator[tuple[int, int]]:
    """Cut a sequence of things into runs [begin, end) whose ``sizes`` sum to at most ``limit``, or of one thing."""
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        before = int(ends[begin - 1]) if begin else 0
        end = max(int(np.searchsorted(ends, before + limit, side="right")), begin + 1)
        yield begin, end
        begin = end


class OwnedDocuments:
    """The documents that other ranks `send`, then, after `number`, in the order of their hashes.

    folder: of the file on disk. key: of the text in a document, which stands there as JSON. Construction is collective.
    ``close`` removes the file.

    After `number`: numbering: the numbers of all ranks' documents. offset, length: the bytes of each on disk. size:
    the bytes of its text. overlaps: whether it shares text with a held-out file. These arrays have an entry for each
    document, at its place: its number less ``numbering.first``.
    """

    numbering: Numbering
    offset: Array
    length: Array
    size: Array
    overlaps: Array

    def __init__(self, world: Communicator, folder: Path, key: str) -> None:
        self._world, self._key = world, key
        self._spill = on_every_rank(world, lambda: SpillFile(folder))
        #: uint64 [documents, 6]: a text's hash in two halves, its line's hash and bytes, its size, whether it overlaps
        self._headings = [np.empty((0, 6), np.uint64)]

    def close(self) -> None:
        """Remove the file."""
        self._spill.close()

    def send(self, documents: list[Document]) -> None:
        """Send documents to the owners of their hashes, and keep those that arrive. Collective."""
        size = self._world.size
        lines, about = [], np.empty((len(documents), 6), np.uint64)
        for number, document in enumerate(documents):
            line = row_line({**document.row, self._key: document.text})
            hashed = text_hash(document.text)
            of_line = blake2b(line, digest_size=8).digest()  # chooses between equal texts with other keys beside them
            about[number] = (
                int.from_bytes(hashed[:8]), int.from_bytes(hashed[8:]), int.from_bytes(of_line), len(line),
                document.size, document.overlaps,
            )  # fmt: skip
            lines.append(line)
        owners = ((about[:, 0] >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)
        (parts,) = split_by(owners, size, np.arange(len(lines)))
        data = [np.frombuffer(bytearray().join(lines[i] for i in part.tolist()), np.uint8) for part in parts]
        arrived = exchange(self._world, data)
        headings = exchange(self._world, [about[part].reshape(-1) for part in parts])
        self._headings += [heading.reshape(-1, 6) for heading in headings]
        on_every_rank(self._world, lambda: [self._spill.append(part) for part in arrived])

    def number(self, count: StageCount, *, deduplicate: bool) -> None:
        """Number the documents in the order of their hashes. Collective.

        deduplicate: drop equal texts first. count: gets the documents, and those that are dropped.
        """
        high, low, line, length, size, overlaps = np.concatenate(self._headings).T
        self._headings.clear()
        order = np.lexsort((line, low, high))
        high, low = high[order], low[order]
        length = length.astype(np.int64)
        offset = np.cumsum(length) - length  # they lie on disk as they came
        columns = offset[order], length[order], size[order].astype(np.int64), overlaps[order].astype(np.bool_)
        self.offset, self.length, self.size, self.overlaps = columns
        count.documents_in, count.bytes_in = len(order), int(self.size.sum())
        if deduplicate:
            again = np.zeros(len(order), np.bool_)
            again[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
            reason = "equal text"
            count.dropped[reason] = int(again.sum())
            for place in np.nonzero(again)[0][:EXAMPLES]:
                count.show(reason, f"{high[place]:016x}{low[place]:016x}", self.text(place))
            self.offset, self.length, self.size, self.overlaps = (column[~again] for column in columns)
        self.numbering = Numbering(self._world, len(self.offset))

    def line(self, place: int) -> bytes:
        """A document as it stands in the output."""
        return self._spill.read(int(self.offset[place]), int(self.length[place]))

    def text(self, place: int) -> str:
        """The text of a document."""
        return self._text_in(self.line(place))

    def _text_in(self, line: bytes) -> str:
        text: str = json.loads(line)[self._key]
        return text

    def texts(self, numbers: Array) -> list[str]:
        """The texts of documents of any rank. numbers: sorted, distinct. Collective."""
        (asked,) = split_by(self.numbering.owners(numbers), self._world.size, numbers)
        questions = exchange(self._world, asked)
        places = [question - self.numbering.first for question in questions]
        lines = [b"".join(map(self.line, part.tolist())) for part in places]
        answers = exchange(self._world, [np.frombuffer(bytearray(line), np.uint8) for line in lines])
        return [self._text_in(line) for answer in answers for line in answer.tobytes().splitlines()]
