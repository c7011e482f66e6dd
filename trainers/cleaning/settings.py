"""The settings of a corpus: what is read, what is dropped, and where the result goes."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainers.data.tokenizer import Tokenizer
from trainers.files.writing import require_folder

DOCUMENT, PIECES, NOTHING = "document", "pieces", "nothing"
DEFAULT_MIN_TOKENS = 128  # the paper's, with GPT-2's tokens
LEAST_JACCARD = 0.7  # the bands of a sketch find 99% of the pairs at this similarity, and fewer below


@dataclass(frozen=True)
class CorpusSettings:
    """The settings of `trainers.prepare_corpus`, where each field is an option of the same name.

    min_tokens: 0: no document is too short.
    """

    input: list[str]
    output: str
    json_key: str = "text"
    split_on_blank_lines: bool = False
    fix_text: bool = True
    languages: tuple[str, ...] | list[str] = ()
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    min_tokens: int = 0
    deduplicate: bool = True
    jaccard: float = LEAST_JACCARD
    decontaminate: tuple[str, ...] | list[str] = ()
    decontaminate_by: str = DOCUMENT
    decontaminate_share: float = 0.1
    overwrite: bool = False
    work_dir: str | None = None
    buffer_megabytes: int = 64

    def to_json(self) -> dict[str, Any]:
        """All fields, in types of JSON."""
        return asdict(self)

    @property
    def folder(self) -> Path:
        """The folder of the spilled text: `work_dir`, or that of the output."""
        return Path(self.work_dir) if self.work_dir is not None else Path(self.output).parent

    @property
    def buffer(self) -> int:
        """`buffer_megabytes` in bytes."""
        return self.buffer_megabytes << 20

    def report(self, suffix: str) -> Path:
        """The report's file of this suffix, beside the output: NAME-report.json of NAME.jsonl."""
        output = Path(self.output)
        return output.with_name(f"{output.stem}-report{suffix}")

    def validate(self) -> None:
        """Raise ValueError, naming the option and what is valid, if files or values are wrong. It opens no file."""
        for option, paths in (("--input", self.input), ("--decontaminate", self.decontaminate)):
            for path in paths:
                if not Path(path).is_file() or not os.access(path, os.R_OK):
                    raise ValueError(f"{option}: {path}: not a file that can be read; valid: .jsonl, .json, UTF-8 text")
        if (self.vocab_file is None) != (self.merge_file is None):
            raise ValueError("--vocab-file and --merge-file: GPT-2's tokenizer needs both")
        if self.vocab_file is not None and self.tokenizer_model is not None:
            raise ValueError("give one tokenizer: --tokenizer-model FILE, or --vocab-file FILE with --merge-file FILE")
        if self.min_tokens and self.vocab_file is None and self.tokenizer_model is None:
            raise ValueError(
                f"--min-tokens {self.min_tokens} needs a tokenizer: give --tokenizer-model FILE, or --vocab-file FILE "
                "with --merge-file FILE"
            )
        self._validate_output()

    def _validate_output(self) -> None:
        output = Path(self.output)
        if output.suffix != ".jsonl":
            raise ValueError(f"--output {output}: the name ends in .jsonl")
        if output.is_dir():
            raise ValueError(f"--output {output}: is a folder")
        options = (("--output", output.parent), ("--work-dir", self.folder))
        for option, folder in options if self.work_dir is not None else options[:1]:
            require_folder(option, folder)
        written = [output, *(self.report(suffix) for suffix in (".json", ".txt", ".png"))]
        for path in written:
            if path.is_dir():
                raise ValueError(f"--output {output}: {path}, which is written beside it, is a folder")
            if any(path.exists() and path.samefile(source) for source in (*self.input, *self.decontaminate)):
                raise ValueError(f"--output {output}: {path} is an --input or --decontaminate file")
        if output.exists() and not self.overwrite:
            raise ValueError(f"--output {output}: exists; give another name, or --overwrite to replace it")

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer by whose tokens length is measured; None where none is given. Raises ValueError."""
        try:
            if self.tokenizer_model is not None:
                return Tokenizer.from_file(self.tokenizer_model)
            if self.vocab_file is not None and self.merge_file is not None:
                return Tokenizer.from_gpt2(self.vocab_file, self.merge_file)
        except (OSError, ValueError) as error:
            option = "--tokenizer-model" if self.tokenizer_model else "--vocab-file, --merge-file"
            raise ValueError(f"{option}: {error}") from error
        return None
