"""Turn text into an indexed data set: ``python -m trainers.preprocess_data --input FILES --output-prefix PREFIX``.

The command writes ``PREFIX.bin``, ``PREFIX.idx`` (Megatron-core's format) and ``PREFIX-tokenizer.json``, or none of
them. With ``--split-sentences``, for BERT, the names begin with ``PREFIX_text_sentence`` in place of ``PREFIX``. Its
memory is bounded by a batch of text and the largest document, not by the input.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from commengine.errors import one_line

from .data import stdlib_text, text_files
from .data.indexed import best_dtype, bin_path, checksums_path, idx_path, tokenizer_path
from .data.indexed_writer import IndexedDatasetWriter
from .data.samples import EpochPermutation
from .data.text_files import TextFileError, TextPiece
from .data.tokenizer import SMALLEST_BPE, Tokenizer
from .data.wordpiece import LARGEST_VOCABULARY, SPECIAL
from .files.writing import require_folder
from .options import OptionError, Parser, ValidRange, between

# Characters that the tokenizer's threads get at a time. Their encodings take about 20 bytes per character.
_BATCH = 1 << 22
#: of ``--lang``; sentencex splits a language that it does not know as English
LANGUAGE = ValidRange(
    lambda code: re.fullmatch(r"[a-z]{2,3}(-[a-z]+)*", code) is not None, "must be a code of ISO 639, such as en or deu"
)
#: the status of a process that Ctrl-C ended, as shells report it
INTERRUPTED = 130
#: whether each of Megatron-LM's --tokenizer-type for WordPiece lower-cases
_LOWERCASE = {"BertWordPieceLowerCase": True, "BertWordPieceCase": False}


def _parser() -> Parser:
    parser = Parser(prog="preprocess_data", description="Tokenise text into an indexed data set.")
    add = parser.add_argument
    add("--input", nargs="+", metavar="FILE", help=".jsonl or .json: one document per line; any other name: UTF-8 text")
    add(
        "--from-stdlib",
        action="store_true",
        help="use the documentation in Python's standard library, about 2 MB",
    )
    add("--json-key", default="text", help="key of the text in a JSON line (default: %(default)s)")
    add("--split-on-blank-lines", action="store_true", help="text files: each paragraph is a document, not each file")
    add(
        "--split-sentences",
        action="store_true",
        help="for BERT: each sentence is an item of its document; write PREFIX_KEY_sentence.bin (KEY: --json-key) ...",
    )
    add(
        "--lang",
        default="en",
        valid=LANGUAGE,
        metavar="CODE",
        help="language of the sentences, ISO 639 (default: %(default)s)",
    )
    add("--output-prefix", required=True, metavar="PREFIX", help="write PREFIX.bin, .idx and -tokenizer.json")
    add("--overwrite", action="store_true", help="replace the data set that PREFIX holds")
    add("--tokenizer-model", metavar="FILE", help="a tokenizer.json")
    add("--vocab-file", metavar="FILE", help="BERT's vocab.txt; or with --merge-file GPT-2's encoder.json")
    add("--merge-file", metavar="FILE", help="GPT-2's vocab.bpe; needs --vocab-file")
    add(
        "--train-bpe",
        type=int,
        valid=between(SMALLEST_BPE, LARGEST_VOCABULARY),
        metavar="N",
        help="train a byte-level BPE of N tokens on the input",
    )
    add(
        "--train-wordpiece",
        type=int,
        valid=between(len(SPECIAL) + 1, LARGEST_VOCABULARY),
        metavar="V",
        help="train BERT's WordPiece of V tokens on the input",
    )
    add(
        "--tokenizer-type",
        choices=_LOWERCASE,
        default="BertWordPieceLowerCase",
        help="whether WordPiece lower-cases the text (default: %(default)s)",
    )
    add(
        "--append-eod",
        action=BooleanOptionalAction,
        help="end each document with <|endoftext|> (default: yes, but for --split-sentences)",
    )
    add(
        "--workers",
        type=int,
        valid=between(1, 4096),
        default=_cores(),
        help="tokenizer threads (default: all cores)",
    )
    return parser


def _cores() -> int:
    # The cores that this process may use, which under srun are fewer than the machine has. macOS does not tell.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(args: Namespace) -> None:
    """Raise ValueError, naming the option, for everything that can be refused before any work is done."""
    if bool(args.input) == args.from_stdlib:
        raise ValueError("give --input FILE... or --from-stdlib, one of the two")
    for path in args.input or ():
        if not Path(path).is_file() or not os.access(path, os.R_OK):
            raise ValueError(f"--input: {path}: not a file that can be read; valid: .jsonl, .json or UTF-8 text")
    if args.split_sentences and importlib.util.find_spec("sentencex") is None:
        raise ValueError("--split-sentences: needs the package sentencex; install it with: pip install '.[bert]'")
    _check_tokenizer(args)

    folder = bin_path(args.output_prefix).parent
    if args.output_prefix.endswith(("/", os.sep)) or bin_path(args.output_prefix).name == ".bin":
        raise ValueError(f"--output-prefix: {args.output_prefix!r} ends in a folder; valid: FOLDER/NAME")
    require_folder("--output-prefix", folder)
    for path in _outputs(_prefix(args)):
        if path.is_dir():
            raise ValueError(f"--output-prefix: {path} is a folder")
        if any(path.exists() and path.samefile(source) for source in args.input or ()):
            raise ValueError(f"--output-prefix: {path} is an --input file")
    if not args.overwrite and idx_path(_prefix(args)).exists():
        raise ValueError(
            f"--output-prefix: there is a data set {_prefix(args)} already; give another prefix, or --overwrite"
        )


def _check_tokenizer(args: Namespace) -> None:
    if args.vocab_file is None and args.merge_file is not None:
        raise ValueError("--merge-file: GPT-2's tokenizer needs --vocab-file, too")
    choices = (args.tokenizer_model, args.vocab_file, args.train_bpe, args.train_wordpiece)
    given = sum(choice is not None for choice in choices)
    if given != 1:
        raise ValueError(
            "give one tokenizer: --tokenizer-model FILE, or --vocab-file FILE (BERT's vocab.txt; GPT-2's encoder.json "
            "needs both, it and --merge-file FILE), or --train-wordpiece V, or --train-bpe N; got "
            f"{'more than one' if given else 'none'}"
        )


def _prefix(args: Namespace) -> str:
    """PREFIX of the output: Megatron-LM's PREFIX_KEY_sentence for a data set of sentences."""
    return f"{args.output_prefix}_{args.json_key}_sentence" if args.split_sentences else args.output_prefix


def _outputs(prefix: str) -> tuple[Path, ...]:
    return bin_path(prefix), idx_path(prefix), tokenizer_path(prefix), checksums_path(prefix)


class _Source:
    """The documents that the command line names. They can be read more than once. size: bytes, for the progress."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._texts: list[str] = []
        if args.from_stdlib:
            texts = list(stdlib_text.documents())
            if not texts:
                raise ValueError("--from-stdlib: this Python has no sources of its standard library")
            # Topics come first, then modules by name. They are shuffled, so that the last documents, which --split
            # holds out, are like the others.
            order = EpochPermutation(len(texts), seed=0)
            self._texts = [texts[order[i]] for i in range(len(texts))]
            self.size = sum(len(text.encode()) for text in texts)
        else:
            self.size = sum(Path(path).stat().st_size for path in args.input)

    def pieces(self) -> Iterator[TextPiece]:
        """All documents, in order. Raises TextFileError and OSError."""
        for text in self._texts:
            yield TextPiece(text, True, len(text.encode()))
        for path in self._args.input or ():
            if text_files.is_json_lines(path):
                yield from text_files.read_json_lines(path, self._args.json_key)
            elif self._args.split_on_blank_lines:
                yield from text_files.read_paragraphs(path)
            else:
                yield from text_files.read_text(path)

    def progress(self, pieces: Iterator[TextPiece], title: str) -> Iterator[TextPiece]:
        """The same pieces. If stderr is a terminal, it draws a bar of the bytes read."""
        with tqdm(total=self.size, desc=title, unit="B", unit_scale=True, disable=None) as bar:
            for piece in pieces:
                yield piece
                bar.update(piece.size)


def _tokenizer(args: Namespace, source: _Source) -> Tokenizer:
    def texts() -> Iterator[str]:
        pieces = source.progress(text_files.cut(source.pieces()), "train tokenizer")
        return (piece.text for piece in pieces)

    if args.train_bpe is not None:
        return Tokenizer.train_bpe(texts(), args.train_bpe)
    lowercase = _LOWERCASE[args.tokenizer_type]
    option = "--tokenizer-model"
    try:
        if args.train_wordpiece is not None:
            option = "--train-wordpiece"
            return Tokenizer.train_wordpiece(texts, args.train_wordpiece, lowercase=lowercase)
        if args.tokenizer_model:
            return Tokenizer.from_file(args.tokenizer_model, lowercase=lowercase)
        if args.merge_file:
            option = "--vocab-file, --merge-file"
            return Tokenizer.from_gpt2(args.vocab_file, args.merge_file)
        option = "--vocab-file (BERT's vocab.txt; GPT-2's tokenizer needs both, --vocab-file and --merge-file)"
        return Tokenizer.from_vocab(args.vocab_file, lowercase=lowercase)
    except TextFileError:  # about the input
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: {error}") from error


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


def preprocess(args: Namespace) -> str:
    """Run the command and return its last line. If it raises ValueError or OSError, it has written nothing."""
    _check(args)
    # The tokenizer reads these when it first starts its threads, and nothing has started them yet.
    os.environ["RAYON_NUM_THREADS"] = str(args.workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if args.workers > 1 else "false"
    source = _Source(args)
    if next(source.pieces(), None) is None:
        raise ValueError(f"--input: no text in {', '.join(args.input)}")
    tokenizer = _tokenizer(args, source)
    eod = None
    if not args.split_sentences if args.append_eod is None else args.append_eod:
        try:
            eod = tokenizer.eod
        except ValueError as error:
            raise ValueError(f"--append-eod: {error}; use --no-append-eod") from error

    start = time.perf_counter()
    if args.split_sentences:
        pieces = text_files.sentences(text_files.whole(source.pieces()), args.lang)
    else:
        pieces = text_files.cut(source.pieces()) if tokenizer.can_cut_text else text_files.whole(source.pieces())
    prefix = _prefix(args)
    tokenizer_file = tokenizer_path(prefix)
    with IndexedDatasetWriter(prefix, best_dtype(tokenizer.vocab_size)) as writer:
        progress = source.progress(pieces, "tokenise")
        items, size = _encode(progress, tokenizer, eod, writer, items=args.split_sentences)
        if not writer.num_tokens:
            raise ValueError("--input: the tokenizer found no token in it")
        writer.add_file(tokenizer_file, tokenizer.to_bytes())
    seconds = time.perf_counter() - start
    sentences = f"{items} sentences, " if args.split_sentences else ""
    return (
        f"{prefix}: {len(writer)} documents, {sentences}{writer.num_tokens} tokens ({writer.dtype.name}), "
        f"{size} bytes of text, {writer.num_tokens / seconds:.0f} tokens per second"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command. After an error it exits with 2, one line on stderr and no output files; after Ctrl-C with 130."""
    try:
        args = _parser().parse_args(argv)
        line = _run(args)
    except OptionError as error:
        print(f"preprocess_data: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("preprocess_data: interrupted; nothing is written", file=sys.stderr)
        sys.exit(INTERRUPTED)
    print(line)


def _run(args: Namespace) -> str:
    """Call `preprocess`. Raises OptionError, naming the option, for each of its errors."""
    try:
        return preprocess(args)
    except TextFileError as error:
        problem = f"--input: {error}"
    except OSError as error:
        option = "--output-prefix" if (error.filename or "").startswith(args.output_prefix) else "--input"
        problem = f"{option}: {error}"
    except ValueError as error:
        problem = str(error)
    raise OptionError(one_line(problem))


if __name__ == "__main__":
    main()
