"""Documents on their way through the stages, and what each stage kept, changed and dropped."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any, Protocol, Self

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
    dropped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[list[Any]]] = field(default_factory=dict)

    def drop(self, reason: str, text: str) -> None:
        """Count a dropped document."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.show(reason, text_hash(text).hex(), text)

    def show(self, reason: str, hashed: str, text: str, **more: Any) -> None:
        """Offer an example. Those of the least hashes stay."""
        shown = self.examples.setdefault(reason, [])
        if len(shown) < EXAMPLES or hashed < shown[-1][0]:
            shown.append([hashed, text[:EXAMPLE_CHARACTERS], more])
            self.examples[reason] = heapq.nsmallest(EXAMPLES, shown, key=lambda example: example[0])

    def add(self, other: dict[str, Any]) -> None:
        """Add what the same stage did on another rank, which is `to_json` of it. ``seconds`` becomes the longest."""
        for name in ("documents_in", "bytes_in", "documents_out", "bytes_out", "changed"):
            setattr(self, name, getattr(self, name) + other[name])
        self.seconds = max(self.seconds, other["seconds"])
        for reason, count in other["dropped"].items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        for reason, examples in other["examples"].items():
            for hashed, text, more in examples:
                self.show(reason, hashed, text, **more)

    def to_json(self) -> dict[str, Any]:
        """All fields, in types of JSON."""
        return asdict(self)

    @classmethod
    def merged(cls, ranks: Iterable[dict[str, Any]]) -> Self:
        """What the stage did on all ranks."""
        first, *others = ranks
        made = cls(**first)
        for other in others:
            made.add(other)
        return made


class Batch:
    """Some documents, and the stage that they are in."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self._count = StageCount("")

    @contextmanager
    def counted(self, count: StageCount) -> Iterator[None]:
        """The block is the stage of ``count``, which gets what the stage does."""
        began = time.perf_counter()
        self._count = count
        count.documents_in += len(self.documents)
        count.bytes_in += sum(document.size for document in self.documents)
        yield
        count.documents_out += len(self.documents)
        count.bytes_out += sum(document.size for document in self.documents)
        count.seconds += time.perf_counter() - began

    def change(self, document: Document, text: str) -> None:
        """Give a document another text."""
        document.text = text
        self._count.changed += 1

    def drop(self, reason: Callable[[Document], str | None]) -> None:
        """Drop the documents for which ``reason`` returns one."""
        kept = []
        for document in self.documents:
            why = reason(document)
            if why is None:
                kept.append(document)
            else:
                self._count.drop(why, document.text)
        self.documents = kept

    def replace(self, texts: Mapping[Document, Sequence[str]]) -> None:
        """Put documents with these texts in place of each document of ``texts`` that has not been dropped."""
        documents = []
        for document in self.documents:
            if document in texts:
                documents += [Document(document.row, text) for text in texts[document]]
                self._count.changed += 1
            else:
                documents.append(document)
        self.documents = documents


class Stage(Protocol):
    """A stage that looks at documents one at a time."""

    name: str

    def __call__(self, batch: Batch) -> None:
        """Change and drop documents of ``batch``."""
