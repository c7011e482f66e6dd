"""Documents on their way through the stages, and what each stage kept, changed and dropped."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Self

#: dropped documents that a report shows for each reason, and how many characters of each
EXAMPLES, EXAMPLE_CHARACTERS = 3, 160


def text_hash(text: str) -> bytes:
    """The 16 bytes by whose order documents are taken: BLAKE2b of the text in UTF-8."""
    return blake2b(text.encode(), digest_size=16).digest()


@dataclass(slots=True, eq=False)
class Document:
    """A document: its JSON object, less the text. overlaps: it has an 8-gram of a held-out text."""

    row: dict[str, Any]
    text: str
    overlaps: bool = False

    @property
    def size(self) -> int:
        """The bytes of the text in UTF-8."""
        return len(self.text) if self.text.isascii() else len(self.text.encode())


@dataclass
class StageCount:
    """What a stage did. Bytes are of text in UTF-8. dropped: documents by reason; examples: their texts' beginnings.

    examples: by reason, those of the least text hashes: [hash, text, more], so that the same ones are shown whatever
    the number of ranks.
    """

    name: str
    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    changed: int = 0
    seconds: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[list[Any]]] = field(default_factory=dict)

    def show(self, reason: str, hashed: str, text: str, **more: Any) -> None:
        """Offer an example. Those of the least hashes stay."""
        shown = self.examples.setdefault(reason, [])
        if len(shown) < EXAMPLES or hashed < shown[-1][0]:
            shown.append([hashed, text[:EXAMPLE_CHARACTERS], more])
            self.examples[reason] = heapq.nsmallest(EXAMPLES, shown, key=lambda example: example[0])

    def dropped_from(self, documents: list[Document], reason: Callable[[Document], str | None]) -> list[Document]:
        """The documents for which ``reason`` returns none; the others are counted with it, and shown."""
        kept = []
        for document in documents:
            if (why := reason(document)) is None:
                kept.append(document)
            else:
                self.dropped[why] += 1
                self.show(why, text_hash(document.text).hex(), document.text)
        return kept

    def counted(self, stage: Stage, documents: list[Document]) -> list[Document]:
        """What ``stage`` makes of the documents, which is counted."""
        began = time.perf_counter()
        self.documents_in += len(documents)
        self.bytes_in += sum(document.size for document in documents)
        found = stage(documents, self)
        self.documents_out += len(found)
        self.bytes_out += sum(document.size for document in found)
        self.seconds += time.perf_counter() - began
        return found

    @classmethod
    def merged(cls, ranks: Sequence[dict[str, Any]]) -> Self:
        """What the stage did on all ranks, each of which is told by its fields; the seconds of the slowest."""
        sums = ("documents_in", "bytes_in", "documents_out", "bytes_out", "changed")
        made = cls(ranks[0]["name"], *(sum(rank[name] for rank in ranks) for name in sums))
        made.seconds = max(rank["seconds"] for rank in ranks)
        for rank in ranks:
            made.dropped.update(rank["dropped"])
            for reason, examples in rank["examples"].items():
                for hashed, text, more in examples:
                    made.show(reason, hashed, text, **more)
        return made


#: What is done with documents, each by itself: it gives those that are left, of which some are changed. The count gets
#: what is changed and dropped.
Stage = Callable[[list[Document], StageCount], list[Document]]
