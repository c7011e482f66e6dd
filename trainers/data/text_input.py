"""TextInput: the options of the commands that read text, which say its files, its documents and its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from commengine.errors import usage_errors
from commengine.options.declared import option, require, words_of

from . import text_files
from .text_files import TextPiece

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class Block(NamedTuple):
    """The documents that begin in bytes [begin, end) of a file, so that each document is in exactly one block."""

    path: str
    begin: int
    end: int


@dataclass(frozen=True)
class TextInput:
    """The settings of a command that reads text. A field is the flag of the same name, with dashes."""

    input: str | Sequence[str] | None = option(
        None, ".jsonl or .json: one document per line; any other name: UTF-8 text", words=True
    )
    json_key: str = option("text", "key of the text in a JSON line")
    split_on_blank_lines: bool = option(False, "text files: each paragraph is a document, not each file")
    tokenizer_model: str | None = option(None, "a tokenizer.json")
    vocab_file: str | None = option(None, "BERT's vocab.txt; or with --merge-file GPT-2's encoder.json")
    merge_file: str | None = option(None, "GPT-2's vocab.bpe; needs --vocab-file")
    overwrite: bool = option(False, "replace the output that is there already")

    @property
    def files(self) -> list[str]:
        """The files of ``--input``."""
        return words_of(self.input)

    def require_files(self, flag: str, files: Sequence[str], written: Sequence[Path], output: str) -> None:
        """Raise UsageError unless ``files``, those of ``flag``, can be read, and ``written`` are other files, or none.

        output: the option that names ``written``, and its value.
        """
        for file in written:
            require(not file.is_dir(), f"{output}: {file} is a folder")
        for path in files:
            usable = Path(path).is_file() and os.access(path, os.R_OK)
            require(usable, f"{flag}: {path}: not a file that can be read; valid: .jsonl, .json or UTF-8 text")
            for file in written:
                same = file.exists() and file.samefile(path)
                require(not same, f"{output}: {file} is an {flag} file")

    def blocks(self, paths: Sequence[str], size: int) -> list[Block]:
        """The blocks of all files, of at most ``size`` bytes where a file can be cut. Raises OSError."""
        found = []
        for path in paths:
            length = Path(path).stat().st_size
            step = size if self.split_on_blank_lines or text_files.is_json_lines(path) else max(length, 1)
            found += [Block(path, begin, min(begin + step, length)) for begin in range(0, length, step)]
        return found

    def pieces(self, path: str, begin: int = 0, end: int | None = None) -> Iterator[TextPiece]:
        """The documents of a file that begin in these bytes, in order. Raises TextFileError and OSError."""
        if text_files.is_json_lines(path):
            return text_files.read_json_lines(path, self.json_key)
        if self.split_on_blank_lines:
            return text_files.read_paragraphs(path, begin, end)
        return text_files.read_text(path)

    def rows(self, path: str, begin: int = 0, end: int | None = None) -> Iterator[dict[str, Any]]:
        """The same documents as JSON objects, with what stands beside the text, as it is written (`AsWritten`).

        Those of blank text are left out.
        """
        if text_files.is_json_lines(path):
            yield from (row for row, _ in text_files.read_rows(path, self.json_key, begin, end, written=True))
            return
        for piece in text_files.whole(self.pieces(path, begin, end)):
            if piece.text.strip():
                yield {self.json_key: piece.text}

    def read_tokenizer(self, *, lowercase: bool | None = None) -> Tokenizer | None:
        """The tokenizer in the files of the options; None if they name none. Raises UsageError that names the option.

        lowercase: as for `Tokenizer.from_file`.
        """
        from .tokenizer import Tokenizer  # its libraries take long to import, and --help needs none

        if self.tokenizer_model is not None:
            with usage_errors("--tokenizer-model: "):
                return Tokenizer.from_file(self.tokenizer_model, lowercase=lowercase)
        if self.vocab_file is not None and self.merge_file is not None:
            with usage_errors("--vocab-file, --merge-file: "):
                return Tokenizer.from_gpt2(self.vocab_file, self.merge_file)
        if self.vocab_file is not None:
            both = "GPT-2's tokenizer needs both, --vocab-file and --merge-file"
            with usage_errors(f"--vocab-file (BERT's vocab.txt; {both}): "):
                return Tokenizer.from_vocab(self.vocab_file, lowercase=lowercase)
        return None

    def require_one_tokenizer(self, *others: Any, needed: bool, also: str = "") -> None:
        """Raise UsageError where the options name more than one tokenizer, or none although one is ``needed``.

        others: the values of other options that give one. also: their words.
        """
        require(self.vocab_file or not self.merge_file, "--merge-file: GPT-2's tokenizer needs --vocab-file, too")
        count = sum(choice is not None for choice in (self.tokenizer_model, self.vocab_file, *others))
        require(
            count == 1 or (count == 0 and not needed),
            "give one tokenizer: --tokenizer-model FILE, or --vocab-file FILE (BERT's vocab.txt; GPT-2's encoder.json "
            f"needs both, it and --merge-file FILE){also}; got {'more than one' if count else 'none'}",
        )
