"""Turn text into an indexed data set: ``python -m trainers.preprocess_data --input FILES --output-prefix PREFIX``.

The command writes ``PREFIX.bin``, ``PREFIX.idx`` (Megatron-core's format) and ``PREFIX-tokenizer.json``, or none of
them. With ``--split-sentences``, for BERT, the names begin with ``PREFIX_text_sentence`` in place of ``PREFIX``. Its
memory is bounded by a batch of text and the largest document, not by the input.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds
    from .data.preprocessing import PreprocessSettings
    from .settings.command import answer_help

    answer_help(PreprocessSettings, "preprocess_data", description="Tokenise text into an indexed data set.")

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from commengine import UsageError
from commengine.errors import one_line, usage_errors
from commengine.options.declared import parse, require

from .data import stdlib_text, text_files
from .data.indexed import best_dtype, checksums_path, settings_path, tokenizer_path
from .data.indexed_writer import IndexedDatasetWriter, write_checksums
from .data.permutation import EpochPermutation
from .data.preprocessing import LOWERCASE, PreprocessSettings
from .data.text_files import TextFileError, TextPiece
from .data.tokenizer import Tokenizer

# Characters that the tokenizer's threads get at a time. Their encodings take about 20 bytes per character.
_BATCH = 1 << 22
#: the status of a process that Ctrl-C ended, as shells report it
INTERRUPTED = 130


def _cores() -> int:
    # The cores that this process may use, which under srun are fewer than the machine has. macOS does not tell.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Source:
    """The documents that the command line names. They can be read more than once. size: bytes, for the progress."""

    def __init__(self, args: PreprocessSettings) -> None:
        self._args = args
        self._texts: list[str] = []
        if args.from_stdlib:
            texts = list(stdlib_text.documents())
            require(texts, "--from-stdlib: this Python has no sources of its standard library")
            # Topics come first, then modules by name. They are shuffled, so that the last documents, which --split
            # holds out, are like the others.
            order = EpochPermutation(len(texts), seed=0)
            self._texts = [texts[order[i]] for i in range(len(texts))]
            self.size = sum(len(text.encode()) for text in texts)
        else:
            self.size = sum(Path(path).stat().st_size for path in args.files)

    def pieces(self) -> Iterator[TextPiece]:
        """All documents, in order. Raises TextFileError and OSError."""
        for text in self._texts:
            yield TextPiece(text, True, len(text.encode()))
        for path in self._args.files:
            yield from self._args.pieces(path)

    def progress(self, pieces: Iterator[TextPiece], title: str) -> Iterator[TextPiece]:
        """The same pieces. If stderr is a terminal, it draws a bar of the bytes read."""
        with tqdm(total=self.size, desc=title, unit="B", unit_scale=True, disable=None) as bar:
            for piece in pieces:
                yield piece
                bar.update(piece.size)


def _tokenizer(args: PreprocessSettings, source: _Source) -> Tokenizer:
    def texts() -> Iterator[str]:
        pieces = source.progress(text_files.cut(source.pieces()), "train tokenizer")
        return (piece.text for piece in pieces)

    lowercase = None if args.tokenizer_type is None else LOWERCASE[args.tokenizer_type]
    if args.train_bpe is not None:
        return Tokenizer.train_bpe(texts(), args.train_bpe)
    if args.train_wordpiece is None:
        found = args.read_tokenizer(lowercase=lowercase)
        assert found is not None
        return found
    try:
        return Tokenizer.train_wordpiece(texts, args.train_wordpiece, lowercase=lowercase is not False)
    except TextFileError:  # about the input
        raise
    except ValueError as error:
        raise UsageError(f"--train-wordpiece: {error}") from error


def _batches(pieces: Iterator[TextPiece]) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text) + 1  # + 1, so that a batch of empty documents ends, too
        if characters >= _BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(
    pieces: Iterator[TextPiece], tokenizer: Tokenizer, eod: int | None, writer: IndexedDatasetWriter, *, items: bool
) -> tuple[int, int]:
    """Write every document that has a token; each piece is an item of it if ``items``. Return items, bytes of text."""
    size = sequences = 0
    document: list[np.ndarray[Any, np.dtype[Any]]] = []
    for batch in _batches(pieces):
        encoded = tokenizer.iter_encode_batch([piece.text for piece in batch])
        for piece, ids in zip(batch, encoded, strict=True):
            size += len(piece.text.encode())
            if ids:
                document.append(np.array(ids, writer.dtype))
            if piece.last and document:
                if eod is not None:
                    document[-1] = np.append(document[-1], np.array(eod, writer.dtype))
                lengths = [len(part) for part in document] if items else None
                writer.add_document(np.concatenate(document), lengths)
                sequences += len(document) if items else 1
            if piece.last:
                document = []
    return sequences, size


def preprocess(args: PreprocessSettings) -> str:
    """Turn valid settings' text into a data set, and return a line. If it raises an error, it has written nothing."""
    # The tokenizer reads these when it first starts its threads, and nothing has started them yet.
    workers = args.workers or _cores()
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if workers > 1 else "false"
    source = _Source(args)
    require(next(source.pieces(), None), f"--input: no text in {', '.join(args.files)}")
    tokenizer = _tokenizer(args, source)
    eod = None
    if not args.split_sentences if args.append_eod is None else args.append_eod:
        with usage_errors("--append-eod (or use --no-append-eod): "):
            eod = tokenizer.eod

    start = time.perf_counter()
    if args.split_sentences:
        pieces = text_files.sentences(text_files.whole(source.pieces()), args.lang)
    else:
        pieces = text_files.cut(source.pieces()) if tokenizer.can_cut_text else text_files.whole(source.pieces())
    prefix = args.prefix
    with IndexedDatasetWriter(prefix, best_dtype(tokenizer.vocab_size)) as writer:
        progress = source.progress(pieces, "tokenise")
        items, size = _encode(progress, tokenizer, eod, writer, items=args.split_sentences)
        require(writer.num_tokens, "--input: the tokenizer found no token in it")
        writer.add_file(tokenizer_path(prefix), tokenizer.to_bytes())
        settings = tokenizer.settings()
        said = None if settings is None else json.dumps(settings, indent=1).encode()
        writer.add_file(settings_path(prefix), said)  # an older data set may have had some
    seconds = time.perf_counter() - start
    sentences = f"{items} sentences, " if args.split_sentences else ""
    return (
        f"{prefix}: {len(writer)} documents, {sentences}{writer.num_tokens} tokens ({writer.dtype.name}), "
        f"{size} bytes of text, {writer.num_tokens / seconds:.0f} tokens per second"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command. After an error it exits with 2, one line on stderr and no output files; after Ctrl-C with 130."""
    prefix = None
    try:
        args = parse(PreprocessSettings, argv, "preprocess_data", description="Tokenise text into an indexed data set.")
        prefix = args.output_prefix
        args.validate()
        if args.write_checksums is None:
            print(preprocess(args))
            return
        with usage_errors("--write-checksums: "):
            size = write_checksums(args.write_checksums)
        print(f"{checksums_path(args.write_checksums)}: checksums of {size:,} bytes")
        return
    except KeyboardInterrupt:
        print("preprocess_data: interrupted; nothing is written", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except OSError as error:
        problem = f"{'--output-prefix' if (error.filename or '').startswith(prefix or '-') else '--input'}: {error}"
    except TextFileError as error:
        problem = f"--input: {error}"
    except (UsageError, ValueError) as error:
        problem = str(error)
    print(f"preprocess_data: error: {one_line(problem)}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
