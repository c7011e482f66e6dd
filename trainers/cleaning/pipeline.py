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
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from commengine import Communicator, UsageError
from commengine.errors import usage_errors
from commengine.rank_zero import gather_json, on_every_rank, on_rank_zero
from trainers.data.text_input import Block

from .documents import EXAMPLE_CHARACTERS, EXAMPLES, Document, Stage, StageCount
from .duplicates import BINS, NearDuplicates
from .exchange import Numbering, reduced
from .filters import chosen_stages
from .grams import BANDS, GRAM, band_keys
from .held_out import Decontaminate
from .owned_documents import OwnedDocuments, SpillFile, chunks
from .settings import CorpusSettings

Array = NDArray[Any]
#: bytes of text that are sketched or compared at a time: they stay in a core's cache
_CACHED = 1 << 17
_BLOCKS = 16  # of each rank, at least, so that all ranks have equally much to do


def prepare(world: Communicator, settings: CorpusSettings) -> dict[str, Any]:
    """Make a corpus as ``settings`` say, which must be valid; return its summary, on rank 0 only ({} elsewhere).

    Collective over ``world``; the ranks must see the same files. Raises UsageError on every rank, and then leaves no
    output.
    """
    with closing(OwnedDocuments(world, settings.folder, settings.json_key)) as documents:
        corpus = _Corpus(world, settings, documents)
        corpus.read()
        corpus.number()
        if settings.deduplicate:
            corpus.drop_near_duplicates()
        corpus.write()
        return corpus.summary()


class _Corpus:
    """The documents of this rank, and what has been done with them."""

    def __init__(self, world: Communicator, settings: CorpusSettings, documents: OwnedDocuments) -> None:
        self._began = time.perf_counter()
        self._world, self._settings, self._documents = world, settings, documents
        self._seconds: dict[str, float] = {}
        self._stages: dict[str, Stage] = on_every_rank(world, lambda: chosen_stages(settings))
        measured = self._stages.get("decontaminate")
        self._measured = measured if isinstance(measured, Decontaminate) else None
        self._counts = {name: StageCount(name) for name in ("read", *self._stages)}
        self._unique = StageCount("deduplicate")
        self._similar, self._histogram = 0, np.zeros(BINS, np.int64)

    # 1. Reading ---------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read this rank's blocks, filter their documents, and spill those that other ranks send. Collective."""
        world, settings = self._world, self._settings
        size = sum(Path(path).stat().st_size for path in settings.files)
        at_once = min(settings.buffer // 8, max(size // (world.size * _BLOCKS), 1 << 16))
        mine = settings.blocks(settings.files, at_once)[world.rank :: world.size]
        with self._bar("read", sum(block.end - block.begin for block in mine), "B") as bar:
            idle = [None] * (reduced(world, len(mine), "max") - len(mine))  # while others read theirs
            for block in [*mine, *idle]:
                documents = on_every_rank(world, lambda block=block: self._filtered(block))  # type: ignore[misc]
                with self._timed("exchange"):
                    self._documents.send(documents)
                bar.update(0 if block is None else block.end - block.begin)
        if not reduced(world, self._counts["read"].documents_out):
            raise UsageError(f"--input: no text in {', '.join(settings.files)}")

    def _filtered(self, block: Block | None) -> list[Document]:
        if block is None:
            return []
        documents = self._counts["read"].counted(lambda *_: self._read(block), [])
        for name, stage in self._stages.items():
            documents = self._counts[name].counted(stage, documents)
        return documents

    def _read(self, block: Block) -> list[Document]:
        key, rows = self._settings.json_key, self._settings.rows(*block)
        with usage_errors("--input: "):
            return [Document(row, row[key]) for row in rows]

    # 2. Order -----------------------------------------------------------------------------------------------------

    def number(self) -> None:
        """Number the documents in the order of their hashes, and drop equal texts. Collective."""
        self._documents.number(self._unique, deduplicate=self._settings.deduplicate)
        self._is_kept = np.ones(self._documents.numbering.held, np.bool_)

    # 3. Near-duplicates -------------------------------------------------------------------------------------------

    def drop_near_duplicates(self) -> None:
        """Sketch all documents, and drop those that are similar to a kept one. Collective."""
        documents, settings = self._documents, self._settings
        duplicates = NearDuplicates(
            self._world, documents.numbering, documents.texts, documents.size, settings.jaccard,
            min(_CACHED, settings.buffer),
        )  # fmt: skip
        with closing(on_every_rank(self._world, lambda: SpillFile(settings.folder))) as keys:
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
                    duplicates.add_band(np.concatenate([nothing.view(np.uint64), *found]), numbers)
        with self._timed("compare"), self._bar("compare", None, "pairs") as bar:
            duplicates.find(bar.update)
        self._similar, self._histogram = duplicates.similar, duplicates.histogram
        self._is_kept = duplicates.kept_one < 0
        self._show_duplicates(duplicates)

    def _sketch(self, keys: SpillFile) -> list[tuple[int, Array]]:
        """Append the band keys of this rank's documents to ``keys``: (offset, documents' numbers) of each run.

        A run has the keys of its documents band by band. The documents are in the order in which they lie on disk.
        """
        on_disk = np.argsort(self._documents.offset)
        runs: list[tuple[int, Array]] = []
        with self._bar("sketch", len(on_disk), "documents") as bar:
            for begin, end in chunks(self._documents.length[on_disk], _CACHED // 2):
                places = on_disk[begin:end]
                texts = [self._documents.text(place) for place in places]
                long = [number for number, text in enumerate(texts) if len(text) >= GRAM]
                if long:
                    at = keys.append(np.ascontiguousarray(band_keys([texts[number] for number in long]).T))
                    runs.append((at, places[long] + self._documents.numbering.first))
                bar.update(end - begin)
        return runs

    def _show_duplicates(self, duplicates: NearDuplicates) -> None:
        """Count the near-duplicates, and show some of them with the document that each is similar to. Collective."""
        dropped = np.nonzero(~self._is_kept)[0]
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
                    if self._measured is not None and documents.overlaps[place]:
                        self._measured.overlap(documents.text(place), 1)
                bar.update(last - first)
            file.flush()
            os.fsync(file.fileno())

    # The report ---------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """What was done, on rank 0, in types of JSON; {} on the other ranks. Collective."""
        world = self._world
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        found = gather_json(world, {
            "stages": [vars(count) for count in (*self._counts.values(), self._unique)],
            "seconds": self._seconds, "peak_memory": memory,
            "similar": self._similar, "histogram": self._histogram.tolist(),
        })  # fmt: skip
        held_out = [] if self._measured is None else self._measured.shares(world)
        if world.rank != 0:
            return {}
        seconds = time.perf_counter() - self._began
        stages = [StageCount.merged(stage) for stage in zip(*(rank["stages"] for rank in found), strict=True)]
        documents = stages[0].documents_out
        histogram = np.sum([rank["histogram"] for rank in found], axis=0).tolist()
        return {
            "settings": self._settings.to_json(),
            "ranks": world.size,
            "documents_in": documents,
            "documents_out": stages[-1].documents_out,
            "output_bytes": self._output_bytes,
            "stages": [vars(stage) for stage in stages],
            "held_out": held_out,
            "candidates": {
                "compared": sum(histogram),
                "similar": sum(rank["similar"] for rank in found),
                "jaccard_histogram": histogram,
            },
            "seconds": seconds,
            "documents_per_second": documents / seconds,
            "seconds_of_parts": {name: max(rank["seconds"].get(name, 0.0) for rank in found) for name in self._seconds},
            "peak_memory_bytes": [rank["peak_memory"] for rank in found],
        }

    # Time and progress --------------------------------------------------------------------------------------------

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - began

    def _bar(self, title: str, count: int | None, unit: str) -> tqdm[NoReturn]:
        """A progress bar of rank 0's part, if standard error is a terminal."""
        disable = None if self._world.rank == 0 else True
        return tqdm(total=count, desc=title, unit=unit, unit_scale=True, disable=disable, leave=False)
