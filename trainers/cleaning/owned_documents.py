"""OwnedDocuments: the documents whose hashes a rank owns.

Their texts are on disk; about 130 bytes of each document are in memory.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commengine import Communicator
from commengine.rank_zero import on_every_rank

from .documents import EXAMPLES, Batch, StageCount, text_hash
from .exchange import Numbering, exchange, split_by
from .input_blocks import Rows, row_line
from .spill import Columns, SpillFile

Array = NDArray[Any]


class OwnedDocuments:
    """The documents that other ranks `send`, then, after `number`, in the order of their hashes.

    folder: of the file on disk. rows: how a document stands there. Construction is collective. ``close`` removes the
    file.

    After `number`: numbering: the numbers of all ranks' documents. offset, length: the bytes of each on disk. size:
    the bytes of its text. overlaps: whether it shares text with a held-out file. These arrays have an entry for each
    document, at its place: its number less ``numbering.first``.
    """

    numbering: Numbering
    offset: Array
    length: Array
    size: Array
    overlaps: Array

    def __init__(self, world: Communicator, folder: Path, rows: Rows) -> None:
        self._world, self._rows = world, rows
        self._spill = on_every_rank(world, lambda: SpillFile(folder))
        self._columns = Columns(high="u8", low="u8", line="u8", offset="i8", length="i4", size="i4", overlaps="?")

    def close(self) -> None:
        """Remove the file."""
        self._spill.close()

    def send(self, batch: Batch) -> None:
        """Send documents to the owners of their hashes, and keep those that arrive. Collective."""
        size, key = self._world.size, self._rows.key
        lines, about = [], np.empty((len(batch.documents), 6), np.uint64)
        for number, document in enumerate(batch.documents):
            line = row_line({**document.row, key: document.text})
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
        on_every_rank(self._world, lambda: self._keep(arrived, headings))

    def _keep(self, arrived: list[Array], headings: list[Array]) -> None:
        for data, heading in zip(arrived, headings, strict=True):
            high, low, line, length, size, overlaps = heading.reshape(-1, 6).T
            begin = self._spill.append(data)
            ends = begin + np.cumsum(length.astype(np.int64))
            offset = ends - length.astype(np.int64)
            self._columns.append(
                high=high, low=low, line=line, offset=offset, length=length, size=size, overlaps=overlaps
            )

    def number(self, count: StageCount, *, deduplicate: bool) -> None:
        """Number the documents in the order of their hashes. Collective.

        deduplicate: drop equal texts first. count: gets the documents, and those that are dropped.
        """
        high, low = self._columns.take("high"), self._columns.take("low")
        order = np.lexsort((self._columns.take("line"), low, high))
        high, low = high[order], low[order]
        self.offset, self.length, self.size, self.overlaps = (
            self._columns.take(name)[order] for name in ("offset", "length", "size", "overlaps")
        )
        count.documents_in, count.bytes_in = len(order), int(self.size.sum())
        if deduplicate:
            again = np.zeros(len(order), np.bool_)
            again[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
            reason = "equal text"
            count.dropped[reason] = int(again.sum())
            for place in np.nonzero(again)[0][:EXAMPLES]:
                count.show(reason, f"{high[place]:016x}{low[place]:016x}", self.text(place))
            self.offset, self.length, self.size, self.overlaps = (
                column[~again] for column in (self.offset, self.length, self.size, self.overlaps)
            )
        self.numbering = Numbering(self._world, len(self.offset))

    def line(self, place: int) -> bytes:
        """A document as it stands in the output."""
        return self._spill.read(int(self.offset[place]), int(self.length[place]))

    def text(self, place: int) -> str:
        """The text of a document."""
        return self._text_in(self.line(place))

    def _text_in(self, line: bytes) -> str:
        text: str = json.loads(line)[self._rows.key]
        return text

    def texts(self, numbers: Array) -> list[str]:
        """The texts of documents of any rank. numbers: sorted, distinct. Collective."""
        (asked,) = split_by(self.numbering.owners(numbers), self._world.size, numbers)
        questions = exchange(self._world, asked)
        places = [question - self.numbering.first for question in questions]
        lines = [b"".join(map(self.line, part.tolist())) for part in places]
        answers = exchange(self._world, [np.frombuffer(bytearray(line), np.uint8) for line in lines])
        return [self._text_in(line) for answer in answers for line in answer.tobytes().splitlines()]
