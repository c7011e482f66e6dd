"""The stages of a corpus on the ranks of a communicator: read, filter, deduplicate, write.

1. Each rank reads its blocks of the input, runs the stages that look at one document, and sends each document to the
   rank that owns its text's hash. The owner spills it to disk.
2. Each rank sorts the hashes of its documents, drops equal texts, and sketches the others.
3. The ranks find and drop near-duplicates (`Duplicates`).
4. Each rank writes the documents that are left into its part of the output, in the order of their hashes.

A rank's memory has the text of a few blocks at a time, and about 130 bytes for each document.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from commengine import Communicator, UsageError
from commengine.rank_zero import on_every_rank, on_rank_zero

from .candidates import CandidateBuckets
from .chosen_stages import chosen_stages
from .documents import EXAMPLE_CHARACTERS, EXAMPLES, Batch, Document, Stage, StageCount
from .duplicates import DROPPED, KEPT, Duplicates, Similarities
from .exchange import Numbering, gathered, largest, total
from .grams import BANDS, GRAM, band_keys
from .held_out import Decontaminate
from .input_blocks import Block, Rows, blocks
from .owned_documents import OwnedDocuments
from .settings import CorpusSettings
from .spill import SpillFile, chunks

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
        self._stages: list[Stage] = on_every_rank(world, lambda: chosen_stages(settings, self._rows))
        self._measured = next((stage for stage in self._stages if isinstance(stage, Decontaminate)), None)
        self._counts = {name: StageCount(name) for name in ("read", *(stage.name for stage in self._stages))}
        self._unique = StageCount("deduplicate")
        self._compared = Similarities()
        self._documents = OwnedDocuments(world, settings.folder, self._rows)
        self._is_kept: Array

    def __enter__(self) -> _Corpus:
        return self

    def __exit__(self, *exception: object) -> None:
        self._documents.close()

    # 1. Reading ---------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read this rank's blocks, filter their documents, and spill those that other ranks send. Collective."""
        world, settings = self._world, self._settings
        size = sum(Path(path).stat().st_size for path in settings.input)
        at_once = min(settings.buffer // 8, max(size // (world.size * _BLOCKS), 1 << 16))
        mine = blocks(settings.input, self._rows, at_once)[world.rank :: world.size]
        with self._bar("read", sum(block.size for block in mine), "B") as bar:
            for turn in range(largest(world, len(mine))):
                block = mine[turn] if turn < len(mine) else None
                batch = on_every_rank(world, lambda block=block: self._filtered(block))  # type: ignore[misc]
                with self._timed("exchange"):
                    self._documents.send(batch)
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

    # 2. Order -----------------------------------------------------------------------------------------------------

    def number(self) -> None:
        """Number the documents in the order of their hashes, and drop equal texts. Collective."""
        self._documents.number(self._unique, deduplicate=self._settings.deduplicate)
        self._is_kept = np.ones(self._documents.numbering.held, np.bool_)

    # 3. Near-duplicates -------------------------------------------------------------------------------------------

    def drop_near_duplicates(self) -> None:
        """Sketch all documents, and drop those that are similar to a kept one. Collective."""
        documents, settings = self._documents, self._settings
        buckets = CandidateBuckets(self._world, documents.numbering, max(settings.buffer // 256, 1))
        keys = on_every_rank(self._world, lambda: SpillFile(settings.folder))
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
        numbering, texts, sizes = documents.numbering, documents.texts, documents.size
        duplicates = Duplicates(
            self._world, numbering, texts, sizes, settings.jaccard, min(_CACHED, settings.buffer)
        )  # fmt: skip
        with self._timed("compare"), self._bar("compare", numbering.held, "documents") as bar:
            duplicates.resolve(buckets, bar.update)
        self._compared = duplicates.compared
        self._is_kept = duplicates.state == KEPT
        self._show_duplicates(duplicates)

    def _sketch(self, keys: SpillFile) -> list[tuple[int, Array]]:
        """Append the band keys of this rank's documents to ``keys``: (offset, documents' numbers) of each run.

        A run has the keys of its documents band by band. The documents are in the order in which they lie on disk.
        """
        on_disk = np.argsort(self._documents.offset)
        runs: list[tuple[int, Array]] = []
        waiting: list[tuple[Array, Array]] = []

        def flush() -> None:
            if waiting:
                found = np.concatenate([part for part, _ in waiting])
                numbers = np.concatenate([part for _, part in waiting])
                runs.append((keys.append(np.ascontiguousarray(found.T)), numbers))
                waiting.clear()

        with self._bar("sketch", len(on_disk), "documents") as bar:
            for begin, end in chunks(self._documents.length[on_disk], _CACHED // 2):
                places = on_disk[begin:end]
                texts = [self._documents.text(place) for place in places]
                long = [number for number, text in enumerate(texts) if len(text) >= GRAM]
                if long:
                    found = band_keys([texts[number] for number in long])
                    waiting.append((found, places[long] + self._documents.numbering.first))
                if sum(len(part) for part, _ in waiting) >= _KEYS_AT_A_TIME:
                    flush()
                bar.update(end - begin)
        flush()
        return runs

    def _show_duplicates(self, duplicates: Duplicates) -> None:
        """Count the near-duplicates, and show some of them with the document that each is similar to. Collective."""
        dropped = np.nonzero(duplicates.state == DROPPED)[0]
        reason = f"similar to a kept document (Jaccard at least {self._settings.jaccard:g})"
        self._unique.dropped[reason] = len(dropped)
        shown = dropped[:EXAMPLES]
        similar = duplicates.kept_one[shown]
        wanted = np.unique(similar)
        kept = dict(zip(wanted.tolist(), self._documents.texts(wanted), strict=True))
        for place in shown.tolist():
            self._unique.show(
                reason,
                f"{place + self._documents.numbering.first:020}",
                self._documents.text(place),
                similar_to=kept[int(duplicates.kept_one[place])][:EXAMPLE_CHARACTERS],
                jaccard=round(float(duplicates.similarity[place]), 4),
            )

    # 4. Writing ---------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write this rank's part of the output, and give the file its name. Collective."""
        output = Path(self._settings.output)
        partial = output.with_name(f".{output.name}.partial")
        kept = np.nonzero(self._is_kept)[0]
        size = int(self._documents.length[kept].sum())
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
        self._unique.bytes_out = int(self._documents.size[kept].sum())
        self._output_bytes = part.count

    def _write_part(self, path: Path, begin: int, kept: Array) -> None:
        documents = self._documents
        with path.open("r+b") as file, self._bar("write", len(kept), "documents") as bar:
            file.seek(begin)
            for first, last in chunks(documents.length[kept], self._settings.buffer // 8):
                for place in kept[first:last]:
                    file.write(documents.line(place))
                    if documents.overlaps[place]:
                        self._look_for_held_out(documents.text(place))
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
        found = torch.from_numpy(np.stack((self._measured.seen, self._left)).astype(np.uint8))
        self._world.all_reduce(found, "max")
        return self._measured.held_out.shares(*found.numpy().astype(np.bool_))

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
