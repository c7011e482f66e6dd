"""Overlap with held-out texts by n-grams of words, and its removal.

Words are the runs of word characters in lower case, as in GPT-2's and Megatron-LM's measurements; what stands between
them does not count. Matches are exact: hashes only find them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain, count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainers.data.text_files import TextFileError

from .documents import Batch, Document

MEASURED = 8  # words of the n-grams by which overlap is measured
#: pieces (tools/openwebtext/filter_ngrams.py of Megatron-LM): words of the n-grams that are cut out, and of the
#: shortest held-out text, which is cut out whole; characters that go with them on either side; characters of the
#: shortest piece that is kept; and the most pieces of a document that is kept
CUT, SHORTEST_CUT, MARGIN, SHORTEST_PIECE, MOST_PIECES = 13, 8, 200, 200, 10
SENTENCE_END = ".!?"

_WORD = re.compile(r"\w+")
_UNKNOWN = -1  # the number of a word that no held-out text has


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    if text.isascii():
        return _WORD.findall(text.lower())
    return [word.lower() for word in _WORD.findall(text)]  # lower() before could cut a word: it makes i and a dot of İ


class NgramTable:
    """Distinct n-grams of numbered words. n: words of each; count: how many."""

    def __init__(self, n: int, rows: NDArray[np.int32]) -> None:
        """rows: [any number, n], with or without repetitions."""
        self.n = n
        for seed in count():
            self._factors = np.random.default_rng(seed).integers(0, 1 << 63, n, np.uint64) * np.uint64(2) + np.uint64(1)
            hashed = np.zeros(len(rows), np.uint64)
            for place in range(n):
                hashed += rows[:, place].astype(np.uint64) * self._factors[place]
            order = np.argsort(hashed, kind="stable")
            hashed, rows = hashed[order], rows[order]
            again = hashed[1:] == hashed[:-1]
            if not (again & (rows[1:] != rows[:-1]).any(axis=1)).any():  # else two n-grams have one hash
                break
        distinct = np.concatenate(([True], ~again))[: len(rows)]
        self._hashed, self._rows = hashed[distinct], rows[distinct]
        self.count = len(self._rows)

    def find(self, numbers: NDArray[np.int32]) -> NDArray[np.int64]:
        """For the n-gram that begins at each number but the last n - 1: its row in the table, or -1."""
        windows = len(numbers) - self.n + 1
        if windows <= 0 or not self.count:
            return np.full(max(windows, 0), -1)
        wide = numbers.astype(np.uint64)
        hashed = wide[:windows] * self._factors[0]
        for place in range(1, self.n):
            hashed += wide[place : place + windows] * self._factors[place]
        rows = np.minimum(np.searchsorted(self._hashed, hashed), self.count - 1)
        likely = np.nonzero(self._hashed[rows] == hashed)[0]
        equal = (self._rows[rows[likely]] == numbers[likely[:, None] + np.arange(self.n)]).all(axis=1)
        found = np.full(windows, -1)
        found[likely[equal]] = rows[likely[equal]]
        return found


class HeldOutTexts:
    """The held-out texts' n-grams: of `MEASURED` words for each file, and those that pieces are cut at.

    files: name and texts of each file. Every rank builds the same one. It takes about 200 bytes of memory for each
    word of the held-out texts, on every rank.
    """

    def __init__(self, files: Iterable[tuple[str, Iterable[str]]]) -> None:
        self._numbers: dict[str, int] = {}
        self.names: list[str] = []
        texts: list[list[NDArray[np.int32]]] = []
        for name, contents in files:
            self.names.append(name)
            texts.append([self._numbered(words(text), grow=True) for text in contents])
        self.measured = NgramTable(MEASURED, _windows(chain.from_iterable(texts), MEASURED))
        #: for each file, the rows of `measured` that it has
        self.rows = [
            np.unique(np.concatenate([np.empty(0, np.int64), *map(self.measured.find, numbers)])) for numbers in texts
        ]
        for name, of_file in zip(self.names, texts, strict=True):
            if all(len(one) < MEASURED for one in of_file):
                raise TextFileError(f"{name}: no text in it has {MEASURED} words in a row, so nothing overlaps with it")
        short: dict[int, list[NDArray[np.int32]]] = {}
        for numbers in chain.from_iterable(texts):
            if SHORTEST_CUT <= len(numbers) < CUT:
                short.setdefault(len(numbers), []).append(numbers)
        #: the longest n-grams first
        self._cut = [NgramTable(CUT, _windows(chain.from_iterable(texts), CUT))]
        self._cut += [NgramTable(n, np.stack(short[n])) for n in sorted(short, reverse=True)]

    def _numbered(self, found: list[str], grow: bool = False) -> NDArray[np.int32]:
        numbers = self._numbers
        if grow:
            return np.fromiter((numbers.setdefault(word, len(numbers)) for word in found), np.int32, len(found))
        return np.fromiter((numbers.get(word, _UNKNOWN) for word in found), np.int32, len(found))

    def overlap(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
        """How many 8-grams each text has, repeated ones included; and the rows in `measured` of those that it shares.

        The rows are repeated as they are in the text.
        """
        numbered = [self._numbered(words(text)) for text in texts]
        gap = np.full(1, _UNKNOWN, np.int32)
        joined = np.concatenate([part for numbers in numbered for part in (numbers, gap)]) if texts else gap
        found = self.measured.find(joined)
        at = np.nonzero(found >= 0)[0]
        lengths = np.fromiter(map(len, numbered), np.int64, len(numbered))
        ends = np.cumsum(lengths + 1)
        shared = np.split(found[at], np.searchsorted(at, ends[:-1])) if texts else []
        return np.maximum(lengths - MEASURED + 1, 0), shared

    def shares(self, before: NDArray[np.bool_], after: NDArray[np.bool_]) -> list[dict[str, Any]]:
        """For each file, the share of its distinct 8-grams that a corpus has, in types of JSON.

        before, after: for each row of `measured` whether the input has it, and whether the output does.
        """
        found = []
        for name, mine in zip(self.names, self.rows, strict=True):
            counts = len(mine), int(before[mine].sum()), int(after[mine].sum())
            shares = [count / counts[0] if counts[0] else 0.0 for count in counts[1:]]
            found.append({
                "file": name, "ngrams": counts[0], "found_in_input": counts[1], "share_in_input": shares[0],
                "found_in_output": counts[2], "share_in_output": shares[1],
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
        numbers = self._numbered([match[0].lower() for match in matches])
        first: tuple[int, int] | None = None
        for table in self._cut:
            at = np.nonzero(table.find(numbers) >= 0)[0][:1]
            if len(at) and (first is None or at[0] < first[0]):
                first = int(at[0]), table.n
        if first is None:
            return None
        begin, length = first
        return matches[begin].start(), matches[begin + length - 1].end()


def _windows(texts: Iterable[NDArray[np.int32]], n: int) -> NDArray[np.int32]:
    """All n-grams of the texts, one in a row."""
    found = [np.lib.stride_tricks.sliding_window_view(numbers, n) for numbers in texts if len(numbers) >= n]
    return np.concatenate(found) if found else np.empty((0, n), np.int32)


def _around(text: str, begin: int, end: int) -> tuple[str, str]:
    """The text up to the last sentence that ends `MARGIN` before ``begin``, and from the first as far after ``end``."""
    stop = max((text.rfind(mark, 0, max(begin - MARGIN + 1, 0)) for mark in SENTENCE_END), default=-1)
    ends = [at for mark in SENTENCE_END if (at := text.find(mark, end + MARGIN)) >= 0]
    return text[: stop + 1] if stop > 0 else "", text[min(ends) + 1 :] if ends else ""


class Decontaminate:
    """Measures the overlap of documents with held-out texts, and removes it.

    by: "document" drops a document if more than ``share`` of its 8-grams are in held-out texts; "pieces" cuts out
    n-grams as `HeldOutTexts.pieces` does, and drops a document of which none or more than `MOST_PIECES` are left;
    "nothing" measures.
    seen: which rows of ``held_out.measured`` documents had that came here.
    """

    name = "decontaminate"

    def __init__(self, held_out: HeldOutTexts, by: str, share: float) -> None:
        self.held_out = held_out
        self._by, self._share = by, share
        self.seen = np.zeros(held_out.measured.count, np.bool_)

    def __call__(self, batch: Batch) -> None:
        """Mark the documents of ``batch`` that overlap, and drop or cut them."""
        counts, shared = self.held_out.overlap([document.text for document in batch.documents])
        shares: dict[Document, float] = {}
        for document, ngrams, rows in zip(batch.documents, counts.tolist(), shared, strict=True):
            if len(rows):
                self.seen[rows] = True
                document.overlaps = True
                shares[document] = len(rows) / ngrams
        if self._by == "document":
            reason = f"more than {self._share:g} of its 8-grams are held out"
            batch.drop(lambda document: reason if shares.get(document, -1.0) > self._share else None)
        elif self._by == "pieces":
            # A held-out text of at least 8 words, so anything that is cut out, has an 8-gram.
            cut = {document: self.held_out.pieces(document.text) for document in shares}
            batch.drop(lambda document: _why_dropped(cut.get(document)))
            batch.replace({document: texts for document, texts in cut.items() if texts != [document.text]})
            self._mark(batch)

    def _mark(self, batch: Batch) -> None:
        """Mark the pieces that still overlap."""
        marked: list[Any] = [document for document in batch.documents if not document.overlaps]
        _, shared = self.held_out.overlap([document.text for document in marked])
        for document, rows in zip(marked, shared, strict=True):
            document.overlaps = bool(len(rows))


def _why_dropped(pieces: list[str] | None) -> str | None:
    if pieces is None or 0 < len(pieces) <= MOST_PIECES:
        return None
    return f"more than {MOST_PIECES} pieces are left" if pieces else "no piece is left"
