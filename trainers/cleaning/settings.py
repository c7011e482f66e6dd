"""The settings of a corpus: what is read, what is dropped, and where the result goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

from commengine.files.writing import require_folder
from commengine.options.declared import given, option, require, require_ranges, words_of
from commengine.options.ranges import Share, between
from trainers.data.text_input import TextInput

DOCUMENT, PIECES, NOTHING = "document", "pieces", "nothing"
DEFAULT_MIN_TOKENS = 128  # the paper's, with GPT-2's tokens
LEAST_JACCARD = 0.7  # the bands of a sketch find 99% of the pairs at this similarity, and fewer below


@dataclass(frozen=True)
class CorpusSettings(TextInput):
    """The settings of `trainers.prepare_corpus`. A field is the flag of the same name, with dashes."""

    output: str = option(None, "write the documents that are kept: NAME.jsonl")
    fix_text: bool = option(True, "mend texts by ftfy")
    languages: str | Sequence[str] = option((), "keep these languages, such as en (default: all)", words=True)
    min_tokens: Annotated[int, between(0, 2**31)] | None = option(
        None, "drop documents of fewer tokens, the end token included; 0: none "
        f"(default: {DEFAULT_MIN_TOKENS} with a tokenizer, else 0)",
    )  # fmt: skip
    deduplicate: bool = option(True, "drop documents that are equal or similar to a kept one")
    jaccard: Annotated[float, between(LEAST_JACCARD, 1)] = option(
        LEAST_JACCARD, "from this Jaccard similarity of their character 5-grams on, documents are similar"
    )
    decontaminate: str | Sequence[str] = option((), "held-out files, such as test sets", words=True)
    decontaminate_by: str = option(
        DOCUMENT, f"{DOCUMENT}: drop a document that has too much held-out text; {PIECES}: cut out 13-grams of words "
        f"with 200 characters on either side, as Megatron-LM does; {NOTHING}: measure only",
        choices=(DOCUMENT, PIECES, NOTHING),
    )  # fmt: skip
    decontaminate_share: Share = option(0.1, f"{DOCUMENT}: too much is more than this share of the document's 8-grams")
    work_dir: str | None = option(None, "a folder for the text that waits on disk (default: the output's)")
    buffer_megabytes: Annotated[int, between(1, 2**20)] = option(64, "a rank reads an eighth of it at a time")

    def completed(self) -> Self:
        """These settings with a list of words for each option that takes several, and the least number of tokens."""
        has_tokenizer = self.tokenizer_model is not None or self.vocab_file is not None
        least = DEFAULT_MIN_TOKENS if has_tokenizer else 0
        lists: dict[str, Any] = {
            name: words_of(getattr(self, name)) for name in ("input", "languages", "decontaminate")
        }
        return replace(self, **lists, min_tokens=least if self.min_tokens is None else self.min_tokens)

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
        """Raise UsageError, naming the option and what is valid, if files or values are wrong. It opens no file."""
        for needed, value in (("--input", self.input), ("--output", self.output)):
            require(value, f"the following arguments are required: {needed}")
        require_ranges(self)
        self.require_one_tokenizer(needed=False)
        tokenizer = self.tokenizer_model is not None or self.vocab_file is not None
        require(
            tokenizer or not self.min_tokens, f"{given(self, 'min_tokens')} needs a tokenizer: --tokenizer-model FILE"
        )
        output, named = Path(self.output), given(self, "output")
        require(output.suffix == ".jsonl", f"{named}: the name ends in .jsonl")
        require_folder("--output", output.parent)
        require_folder("--output" if self.work_dir is None else "--work-dir", self.folder)
        written = [output, *(self.report(suffix) for suffix in (".json", ".txt", ".png"))]
        self.require_files("--input", self.files, written, named)
        self.require_files("--decontaminate", words_of(self.decontaminate), written, named)
        there = output.exists() and not self.overwrite
        require(not there, f"{named}: exists; give another name, or --overwrite to replace it")
