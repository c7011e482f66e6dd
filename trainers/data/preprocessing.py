"""The settings of trainers.preprocess_data."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from commengine.files.writing import require_folder
from commengine.options.declared import flag_of, option, require, require_ranges
from commengine.options.ranges import ValidRange, between

from .text_input import TextInput
from .vocabularies import LARGEST_VOCABULARY, SMALLEST_BPE, SPECIAL

#: of ``--lang``; sentencex splits a language that it does not know as English
LANGUAGE = ValidRange(
    lambda code: re.fullmatch(r"[a-z]{2,3}(-[a-z]+)*", code) is not None, "must be a code of ISO 639, such as en or deu"
)
#: whether each of Megatron-LM's --tokenizer-type for WordPiece lower-cases
LOWERCASE = {"BertWordPieceLowerCase": True, "BertWordPieceCase": False}


@dataclass(frozen=True)
class PreprocessSettings(TextInput):
    """The settings of `trainers.preprocess_data`. A field is the flag of the same name, with dashes."""

    from_stdlib: bool = option(False, "use the documentation in Python's standard library, about 2 MB")
    split_sentences: bool = option(
        False, "for BERT: each sentence is an item of its document; write PREFIX_KEY_sentence.bin (KEY: --json-key) ..."
    )
    lang: Annotated[str, LANGUAGE] = option("en", "language of the sentences, ISO 639")
    output_prefix: str = option(None, "write PREFIX.bin, .idx and -tokenizer.json")
    train_bpe: Annotated[int, between(SMALLEST_BPE, LARGEST_VOCABULARY)] | None = option(
        None, "train a byte-level BPE of this many tokens on the input"
    )
    train_wordpiece: Annotated[int, between(len(SPECIAL) + 1, LARGEST_VOCABULARY)] | None = option(
        None, "train BERT's WordPiece of this many tokens on the input"
    )
    tokenizer_type: str | None = option(
        None, "whether WordPiece lower-cases the text (default: what do_lower_case beside a vocab.txt says, else "
        "BertWordPieceLowerCase)", choices=tuple(LOWERCASE),
    )  # fmt: skip
    append_eod: bool | None = option(
        None, "end each document with <|endoftext|> (default: yes, but for --split-sentences)"
    )
    write_checksums: str | None = option(
        None, "write PREFIX.xxh3, the checksums of a data set of another program, and nothing else"
    )
    workers: Annotated[int, between(1, 4096)] | None = option(None, "tokenizer threads (default: all cores)")

    @property
    def prefix(self) -> str:
        """PREFIX of the output: Megatron-LM's PREFIX_KEY_sentence for a data set of sentences."""
        return f"{self.output_prefix}_{self.json_key}_sentence" if self.split_sentences else self.output_prefix

    def validate(self) -> None:
        """Raise UsageError, naming the option, for everything that can be refused before any work is done."""
        from .indexed import bin_path, checksums_path, idx_path, settings_path, tokenizer_path  # numpy, unlike --help

        if self.write_checksums is not None:
            given = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
            others = [flag_of(name) for name in given if name not in ("write_checksums", "overwrite")]
            require(not others, f"--write-checksums: reads a data set that is there; leave out {', '.join(others)}")
            path = checksums_path(self.write_checksums)
            require(self.overwrite or not path.exists(), f"--write-checksums: {path} exists; --overwrite replaces it")
            return
        require(self.output_prefix, "the following arguments are required: --output-prefix")
        require_ranges(self)
        require(bool(self.files) != self.from_stdlib, "give --input FILE... or --from-stdlib, one of the two")
        installed = not self.split_sentences or importlib.util.find_spec("sentencex") is not None
        require(installed, "--split-sentences: needs the package sentencex; install it with: pip install '.[bert]'")
        also = ", or --train-wordpiece V, or --train-bpe N"
        self.require_one_tokenizer(self.train_bpe, self.train_wordpiece, needed=True, also=also)
        named = f"--output-prefix: {self.output_prefix!r}"
        has_name = Path(f"{self.output_prefix}.bin").name != ".bin" and not self.output_prefix.endswith(("/", os.sep))
        require(has_name, f"{named} ends in a folder; valid: FOLDER/NAME")
        require_folder("--output-prefix", bin_path(self.output_prefix).parent)
        written = [path(self.prefix) for path in (bin_path, idx_path, tokenizer_path, settings_path, checksums_path)]
        self.require_files("--input", self.files, written, "--output-prefix")
        there = not self.overwrite and idx_path(self.prefix).exists()
        require(not there, f"--output-prefix: there is a data set {self.prefix} already; give another, or --overwrite")
