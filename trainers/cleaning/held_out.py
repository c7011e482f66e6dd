"""Overlap with held-out texts by n-grams of words, and its removal.

Words are the runs of word characters in lower case, as in GPT-2's and Megatron-LM's measurements; what stands between
them does not count.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from commengine import Communicator
from trainers.data.text_files import TextFileError

from .documents import Document, StageCount

MEASURED = 8  # words of the n-grams by which overlap is measured
#: pieces (tools/openwebtext/filter_ngrams.py of Megatron-LM): words of the n-grams that are cut out, and of the
#: shortest held-out text, which is cut out whole; characters that go with them on either side; characters of the
#: shortest piece that is kept; and the most pieces of a document that is kept
CUT, SHORTEST_CUT, MARGIN, SHORTEST_PIECE, MOST_PIECES = 13, 8, 200, 200, 10
SENTENCE_END = ".!?"

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    if text.isascii():
        return _WORD.findall(text.lower())
    return [word.lower() for word in _WORD.findall(text)]  # lower() before could cut a word: it makes i and a dot of İ


def _ngrams(found: list[str], n: int) -> Iterator[tuple[str, ...]]:
    """The n-gram that begins at each word but the last n - 1."""
    return zip(*(found[place:] for place in range(n)), strict=False)


class Decontaminate:
    """Measures the overlap of documents with held-out texts, and removes it.

    files: name and texts of each held-out file; every rank gives the same ones. by: "document" drops a document if more
    than ``share`` of its 8-grams are in held-out texts; "pieces" cuts out n-grams as `pieces` does, and drops a
    document of which none or more than `MOST_PIECES` are left; "nothing" measures.

    Every rank has the n-grams in memory: about 220 bytes for each word of the held-out texts, and 390 with "pieces".
    """

    def __init__(self, files: Iterable[tuple[str, Iterable[str]]], by: str, share: float) -> None:
        self._by, self._share = by, share
        #: the number of each distinct 8-gram of the held-out texts; and those numbers that each file has
        self._measured: dict[tuple[str, ...], int] = {}
        self._files: dict[str, set[int]] = {}
        #: the n-grams to cut out, by n, the longest first
        self._cut: dict[int, set[tuple[str, ...]]] = {n: set() for n in range(CUT, SHORTEST_CUT - 1, -1)}
        for name, texts in files:
            mine = self._files.setdefault(name, set())
            for text in texts:
                found = [sys.intern(word) for word in words(text)]
                mine |= {self._measured.setdefault(gram, len(self._measured)) for gram in _ngrams(found, MEASURED)}
                if by == "pieces" and len(found) >= SHORTEST_CUT:
                    length = min(len(found), CUT)
                    self._cut[length].update(_ngrams(found, length))
            if not mine:
                raise TextFileError(f"{name}: no text in it has {MEASURED} words in a row, so nothing overlaps with it")
        #: which 8-grams documents of the input had that came here, and those of the output
        self._seen = np.zeros((2, len(self._measured)), np.uint8)

    def __call__(self, documents: list[Document], count: StageCount) -> list[Document]:
        """The documents, of which those that overlap are marked, and dropped or cut."""
        shares: dict[Document, float] = {}
        for document in documents:
            if share := self.overlap(document.text, 0):
                document.overlaps = True
                shares[document] = share
        if self._by == "document":
            reason = f"more than {self._share:g} of its 8-grams are held out"
            return count.dropped_from(documents, lambda one: reason if shares.get(one, -1.0) > self._share else None)
        if self._by == "nothing":
            return documents
        # A held-out text of at least 8 words, so anything that is cut out, has an 8-gram.
        cut = {document: self.pieces(document.text) for document in shares}
        found: list[Document] = []
        for document in count.dropped_from(documents, lambda one: _why_dropped(cut.get(one))):
            pieces = cut.get(document, [document.text])
            count.changed += pieces != [document.text]
            found += [Document(document.row, one, document.overlaps) for one in pieces]
        return found

    def overlap(self, text: str, output: int) -> float:
        """The share of a text's 8-grams that held-out texts have. output: whether it is of the output, 0 or 1."""
        found = words(text)
        shared = [self._measured[gram] for gram in _ngrams(found, MEASURED) if gram in self._measured]
        self._seen[output, shared] = True
        return len(shared) / max(len(found) - MEASURED + 1, 1)

    def shares(self, comm: Communicator) -> list[dict[str, Any]]:
        """For each file, the share of its distinct 8-grams that the corpus has, in types of JSON. Collective."""
        comm.all_reduce(torch.from_numpy(self._seen), "max")
        found = []
        for name, mine in self._files.items():
            in_input, in_output = self._seen[:, list(mine)].sum(axis=1, dtype=np.int64).tolist()
            found.append({
                "file": name, "ngrams": len(mine), "found_in_input": in_input, "share_in_input": in_input / len(mine),
                "found_in_output": in_output, "share_in_output": in_output / len(mine),
            })  # fmt: skip
        return found

    def pieces(self, text: str) -> list[str]:
        """What is left of a text when its n-grams of 13 words that held-out texts have are cut out.

        `MARGIN` characters on either side go too, up to the end of a sentence. Pieces below `SHORTEST_PIECE` characters
        are left out. A held-out text of 8 to 12 words is cut out where all its words stand in the text.
        """
        kept, rest = [], [text]
        while rest:
            part = rest.pop()
            span = self._first(part)
            if span is None:
                kept.append(part)
                continue
            before, after = _around(part, *span)
            if len(before) >= SHORTEST_PIECE:
                kept.append(before)
            if len(after) >= SHORTEST_PIECE:
                rest.append(after)
        return kept

    def _first(self, text: str) -> tuple[int, int] | None:
        """Begin and end of the first n-gram in the text that is to be cut out."""
        matches = list(_WORD.finditer(text))
        found = [match[0].lower() for match in matches]
        firsts = [
            (begin, begin + n - 1)
            for n, cut in self._cut.items()
            if (begin := next((at for at, gram in enumerate(_ngrams(found, n)) if gram in cut), None)) is not None
        ]
        if not firsts:
            return None
        begin, last = min(firsts, key=lambda one: one[0])
        return matches[begin].start(), matches[last].end()


def _around(text: str, begin: int, end: int) -> tuple[str, str]:
    """The text up to the last sentence that ends `MARGIN` before ``begin``, and from the first as far after ``end``."""
    stop = max((text.rfind(mark, 0, max(begin - MARGIN + 1, 0)) for mark in SENTENCE_END), default=-1)
    ends = [at for mark in SENTENCE_END if (at := text.find(mark, end + MARGIN)) >= 0]
    return text[: stop + 1] if stop > 0 else "", text[min(ends) + 1 :] if ends else ""


def _why_dropped(pieces: list[str] | None) -> str | None:
    if pieces is None or 0 < len(pieces) <= MOST_PIECES:
        return None
    return f"more than {MOST_PIECES} pieces are left" if pieces else "no piece is left"
