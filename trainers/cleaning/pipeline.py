"""The stages of a corpus on the ranks of a communicator: read, filter, deduplicate, write.

1. Each rank reads its blocks of the input, runs the stages that look at one document, and sends each document to the
   rank that owns its text's hash. The owner spills it to disk.
2. Each rank sorts the hashes of its documents, drops equal texts, and sketches the others.
3. The ranks find and drop near-duplicates (`Duplicates`).
4. Each rank writes the documents that are left into its part of the output, in the order of their hashes.

A rank's memory has the text of a few blocks at a time, and about 130 bytes for each document.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from commengine import Communicator, UsageError
from commengine.rank_zero import on_every_rank, on_rank_zero

from .candidates import CandidateBuckets
from .documents import EXAMPLE_CHARACTERS, EXAMPLES, Batch, Document, Stage, StageCount, text_hash
from .duplicates import DROPPED, KEPT, Duplicates, Similarities
from .exchange import Numbering, exchange, gathered, largest, split_by, total
from .filters import DropShort, FixText, KeepLanguages
from .grams import BANDS, GRAM, band_keys
from .held_out import Decontaminate, HeldOutTexts
from .input_blocks import Block, Rows, blocks, row_line
from .settings import CorpusSettings
from .spill import Columns, SpillFile, chunks

Array = NDArray[Any]
#: bytes of text that are sketched or compared at a time: they stay in a core's cache
_CACHED = 1 << 17
_BLOCKS = 16  # of each rank, at least, so that all ranks have equally much to do
_KEYS_AT_A_TIME = 1 << 13


def prepare(world: Communicator, settings: CorpusSettings) -> dict[str, Any]:
    """Make a corpus as ``settings`` say, which must be valid; return its summary, on rank 0 only ({} elsewhere).

    Collective over ``world``; the ranks must see the same files. Raises UsageError on every rank, and then leaves no
    output.
    """
    with _Corpus(world, settings) as corpus:
        corpus.read()
        corpus.number()
        if settings.deduplicate:
            corpus.drop_near_duplicates()
        corpus.write()
        return corpus.summary()


class _Corpus:
    """The documents of this rank, and what has been done with them."""

    def __init__(self, world: Communicator, settings: CorpusSettings) -> None:
        self._began = time.perf_counter()
        self._world, self._settings = world, settings
        self._rows = Rows(settings.json_key, settings.split_on_blank_lines)
        self._seconds: dict[str, float] = {}
        self._measured: Decontaminate | None = None
        self._stages: list[Stage] = on_every_rank(world, self._make_stages)
        self._counts = {name: StageCount(name) for name in ("read", *(stage.name for stage in self._stages))}
        self._unique = StageCount("deduplicate")
        self._compared = Similarities()
        self._spill = on_every_rank(world, lambda: SpillFile(settings.folder))
        self._documents: Numbering

    def __enter__(self) -> _Corpus:
        return self

    def __exit__(self, *exception: object) -> None:
        self._spill.close()

    def _make_stages(self) -> list[Stage]:
        settings = self._settings
        stages: list[Stage] = []
        # Held-out texts are mended, too: a text and its copy must have the same words.
        mended: Callable[[str], str] = str
        if settings.fix_text:
            fix = FixText()
            stages.append(fix)
            mended = fix.fixed
        if settings.languages:
            stages.append(KeepLanguages(settings.languages))
        if settings.decontaminate:
            files = ((path, map(mended, self._texts_of(path))) for path in settings.decontaminate)
            try:
                held_out = HeldOutTexts(files)
            except ValueError as error:
                raise UsageError(f"--decontaminate: {error}") from error
            self._measured = Decontaminate(held_out, settings.decontaminate_by, settings.decontaminate_share)
            stages.append(self._measured)
        tokenizer = settings.tokenizer()
        if tokenizer is not None and settings.min_tokens:
            stages.append(DropShort(tokenizer, settings.min_tokens))
        return stages

    def _texts_of(self, path: str) -> Iterator[str]:
        for block in blocks([path], self._rows, sys.maxsize):
            for row in self._rows.read(block):
                yield row[self._rows.key]

    # 1. Reading ---------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read this rank's blocks, filter their documents, and spill those that other ranks send. Collective."""
        world, settings = self._world, self._settings
        size = sum(Path(path).stat().st_size for path in settings.input)
        at_once = min(settings.buffer // 8, max(size // (world.size * _BLOCKS), 1 << 16))
        mine = blocks(settings.input, self._rows, at_once)[world.rank :: world.size]
        self._columns = Columns(high="u8", low="u8", line="u8", offset="i8", length="i4", size="i4", overlaps="?")
        with self._bar("read", sum(block.size for block in mine), "B") as bar:
            for turn in range(largest(world, len(mine))):
                block = mine[turn] if turn < len(mine) else None
                batch = on_every_rank(world, lambda block=block: self._filtered(block))  # type: ignore[misc]
                with self._timed("exchange"):
                    self._send(batch)
                bar.update(0 if block is None else block.size)
        if not total(world, self._counts["read"].documents_out):
            raise UsageError(f"--input: no text in {', '.join(settings.input)}")

    def _filtered(self, block: Block | None) -> Batch:
        batch = Batch([])
        if block is None:
            return batch
        with batch.counted(self._counts["read"]):
            key = self._rows.key
            try:
                batch.documents = [Document(row, row[key]) for row in self._rows.read(block)]
            except ValueError as error:
                raise UsageError(f"--input: {error}") from error
        for stage in self._stages:
            with batch.counted(self._counts[stage.name]):
                stage(batch)
        return batch

    def _send(self, batch: Batch) -> None:
        """Send documents to the owners of their hashes, and spill those that arrive. Collective."""
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

    # 2. Order -----------------------------------------------------------------------------------------------------

    def number(self) -> None:
        """Number the documents in the order of their hashes, and drop equal texts. Collective."""
        high, low = self._columns.take("high"), self._columns.take("low")
        order = np.lexsort((self._columns.take("line"), low, high))
        high, low = high[order], low[order]
        self._offset, self._length, self._size, self._overlaps = (
            self._columns.take(name)[order] for name in ("offset", "length", "size", "overlaps")
        )
        self._unique.documents_in, self._unique.bytes_in = len(order), int(self._size.sum())
        if self._settings.deduplicate:
            again = np.zeros(len(order), np.bool_)
            again[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
            reason = "equal text"
            self._unique.dropped[reason] = int(again.sum())
            for place in np.nonzero(again)[0][:EXAMPLES]:
                self._unique.show(reason, f"{high[place]:016x}{low[place]:016x}", self._text(self._line(place)))
            self._offset, self._length, self._size, self._overlaps = (
                column[~again] for column in (self._offset, self._length, self._size, self._overlaps)
            )
        self._documents = Numbering(self._world, len(self._offset))
        self._is_kept = np.ones(len(self._offset), np.bool_)

    def _line(self, place: int) -> bytes:
        return self._spill.read(int(self._offset[place]), int(self._length[place]))

    def _text(self, line: bytes) -> str:
        text: str = json.loads(line)[self._rows.key]
        return text

    # 3. Near-duplicates -------------------------------------------------------------------------------------------

    def drop_near_duplicates(self) -> None:
        """Sketch all documents, and drop those that are similar to a kept one. Collective."""
        budget = max(self._settings.buffer // 256, 1)
        buckets = CandidateBuckets(self._world, self._documents, budget)
        keys = on_every_rank(self._world, lambda: SpillFile(self._settings.folder))
        try:
            with self._timed("sketch"):
                runs = on_every_rank(self._world, lambda: self._sketch(keys))
            with self._timed("candidates"):
                nothing = np.empty(0, np.int64)
                numbers = np.concatenate([nothing, *(part for _, part in runs)])
                for band in range(BANDS):
                    found = [
                        np.frombuffer(keys.read(at + 8 * band * len(part), 8 * len(part)), np.uint64)
                        for at, part in runs
                    ]
                    buckets.add_band(np.concatenate([nothing.view(np.uint64), *found]), numbers)
        finally:
            keys.close()
        settings = self._settings
        duplicates = Duplicates(
            self._world, self._documents, self._texts, self._size, settings.jaccard, min(_CACHED, settings.buffer)
        )
        with self._timed("compare"), self._bar("compare", self._documents.held, "documents") as bar:
            duplicates.resolve(buckets, bar.update)
        self._compared = duplicates.compared
        self._is_kept = duplicates.state == KEPT
        self._show_duplicates(duplicates)

    def _sketch(self, keys: SpillFile) -> list[tuple[int, Array]]:
        """Append the band keys of this rank's documents to ``keys``: (offset, documents' numbers) of each run.

        A run has the keys of its documents band by band. The documents are in the order in which they lie on disk.
        """
        on_disk = np.argsort(self._offset)
        runs: list[tuple[int, Array]] = []
        waiting: list[tuple[Array, Array]] = []

        def flush() -> None:
            if waiting:
                found = np.concatenate([part for part, _ in waiting])
                numbers = np.concatenate([part for _, part in waiting])
                runs.append((keys.append(np.ascontiguousarray(found.T)), numbers))
                waiting.clear()

        with self._bar("sketch", len(on_disk), "documents") as bar:
            for begin, end in chunks(self._length[on_disk], _CACHED // 2):
                places = on_disk[begin:end]
                texts = [self._text(self._line(place)) for place in places]
                long = [number for number, text in enumerate(texts) if len(text) >= GRAM]
                if long:
                    found = band_keys([texts[number] for number in long])
                    waiting.append((found, places[long] + self._documents.first))
                if sum(len(part) for part, _ in waiting) >= _KEYS_AT_A_TIME:
                    flush()
                bar.update(end - begin)
        flush()
        return runs

    def _texts(self, numbers: Array) -> list[str]:
        """The texts of documents of any rank. numbers: sorted, distinct. Collective."""
        (asked,) = split_by(self._documents.owners(numbers), self._world.size, numbers)
        questions = exchange(self._world, asked)
        places = [question - self._documents.first for question in questions]
        lines = [b"".join(map(self._line, part.tolist())) for part in places]
        answers = exchange(self._world, [np.frombuffer(bytearray(line), np.uint8) for line in lines])
        return [self._text(line) for answer in answers for line in answer.tobytes().splitlines()]

    def _show_duplicates(self, duplicates: Duplicates) -> None:
        """Count the near-duplicates, and show some of them with the document that each is similar to. Collective."""
        dropped = np.nonzero(duplicates.state == DROPPED)[0]
        reason = f"similar to a kept document (Jaccard at least {self._settings.jaccard:g})"
        self._unique.dropped[reason] = len(dropped)
        shown = dropped[:EXAMPLES]
        similar = duplicates.kept_one[shown]
        wanted = np.unique(similar)
        kept = dict(zip(wanted.tolist(), self._texts(wanted), strict=True))
        for place in shown.tolist():
            self._unique.show(
                reason,
                f"{place + self._documents.first:020}",
                self._text(self._line(place)),
                similar_to=kept[int(duplicates.kept_one[place])][:EXAMPLE_CHARACTERS],
                jaccard=round(float(duplicates.similarity[place]), 4),
            )

    # 4. Writing ---------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write this rank's part of the output, and give the file its name. Collective."""
        output = Path(self._settings.output)
        partial = output.with_name(f".{output.name}.partial")
        kept = np.nonzero(self._is_kept)[0]
        size = int(self._length[kept].sum())
        part = Numbering(self._world, size)
        on_rank_zero(self._world, lambda: partial.open("wb").close())
        self._left = np.zeros(self._measured.held_out.measured.count if self._measured else 0, np.bool_)
        try:
            with self._timed("write"):
                on_every_rank(self._world, lambda: self._write_part(partial, part.first, kept))
                on_rank_zero(self._world, lambda: str(partial.replace(output)))
        except BaseException:
            if self._world.rank == 0:
                partial.unlink(missing_ok=True)
            raise
        self._unique.documents_out = len(kept)
        self._unique.bytes_out = int(self._size[kept].sum())
        self._output_bytes = part.count

    def _write_part(self, path: Path, begin: int, kept: Array) -> None:
        with path.open("r+b") as file, self._bar("write", len(kept), "documents") as bar:
            file.seek(begin)
            for first, last in chunks(self._length[kept], self._settings.buffer // 8):
                for place in kept[first:last]:
                    line = self._line(place)
                    file.write(line)
                    if self._overlaps[place]:
                        self._look_for_held_out(self._text(line))
                bar.update(last - first)
            file.flush()
            os.fsync(file.fileno())

    def _look_for_held_out(self, text: str) -> None:
        if self._measured is not None:
            _, (rows,) = self._measured.held_out.overlap([text])
            self._left[rows] = True

    # The report ---------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """What was done, on rank 0, in types of JSON; {} on the other ranks. Collective."""
        world = self._world
        found = gathered(
            world,
            {
                "stages": [count.to_json() for count in (*self._counts.values(), self._unique)],
                "seconds": self._seconds,
                "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                * (1 if sys.platform == "darwin" else 1024),
                "pairs": self._compared.pairs,
                "similar": self._compared.similar,
                "histogram": self._compared.histogram.tolist(),
            },
        )
        held_out = self._held_out()
        if world.rank != 0:
            return {}
        seconds = time.perf_counter() - self._began
        stages = [StageCount.merged(stage) for stage in zip(*(rank["stages"] for rank in found), strict=True)]
        documents = stages[0].documents_out
        return {
            "settings": self._settings.to_json(),
            "ranks": world.size,
            "documents_in": documents,
            "documents_out": stages[-1].documents_out,
            "output_bytes": self._output_bytes,
            "stages": [stage.to_json() for stage in stages],
            "held_out": held_out,
            "candidates": {
                "compared": sum(rank["pairs"] for rank in found),
                "similar": sum(rank["similar"] for rank in found),
                "jaccard_histogram": np.sum([rank["histogram"] for rank in found], axis=0).tolist(),
            },
            "seconds": seconds,
            "documents_per_second": documents / seconds,
            "seconds_of_parts": {name: max(rank["seconds"].get(name, 0.0) for rank in found) for name in self._seconds},
            "peak_memory_bytes": [rank["peak_memory"] for rank in found],
        }

    def _held_out(self) -> list[dict[str, Any]]:
        """For each held-out file, the share of its distinct 8-grams that the corpus has. Collective."""
        if self._measured is None:
            return []
        held_out = self._measured.held_out
        found = torch.from_numpy(np.stack((self._measured.seen, self._left)).astype(np.uint8))
        self._world.all_reduce(found, "max")
        before, after = found.numpy().astype(np.bool_)
        rows = []
        for name, mine in zip(held_out.names, held_out.rows, strict=True):
            counts = len(mine), int(before[mine].sum()), int(after[mine].sum())
            shares = [count / counts[0] if counts[0] else 0.0 for count in counts[1:]]
            rows.append({
                "file": name, "ngrams": counts[0], "found_in_input": counts[1], "share_in_input": shares[0],
                "found_in_output": counts[2], "share_in_output": shares[1],
            })  # fmt: skip
        return rows

    # Time and progress --------------------------------------------------------------------------------------------

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - began

    def _bar(self, title: str, count: int, unit: str) -> tqdm[NoReturn]:
        """A progress bar of rank 0's part, if standard error is a terminal."""
        disable = None if self._world.rank == 0 else True
        return tqdm(total=count, desc=title, unit=unit, unit_scale=True, disable=disable, leave=False)
