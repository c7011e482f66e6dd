"""Stages that look at one document alone: mending its text, its language, its number of tokens; and their order."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from commengine import UsageError
from commengine.errors import usage_errors
from trainers.data.tokenizer import Tokenizer

from .documents import Document, Stage, StageCount
from .held_out import Decontaminate
from .settings import CorpusSettings

#: characters of a document from which its language is told
LANGUAGE_CHARACTERS = 10_000
INSTALL = "install it with pip install '.[corpus]'"

# Printable ASCII but "&", tabs and newlines: ftfy has nothing to mend in it.
_PLAIN = re.compile(r"[\t\n -%'-~]*")


class FixText:
    """Mends broken Unicode and HTML entities in every text: `ftfy.fix_text` with its defaults."""

    def __init__(self) -> None:
        try:
            import ftfy
        except ImportError as error:
            raise UsageError(f"--fix-text needs ftfy: {INSTALL}, or give --no-fix-text") from error
        self._fix: Callable[[str], str] = ftfy.fix_text

    def __call__(self, documents: list[Document], count: StageCount) -> list[Document]:
        """The documents with mended texts; one of which nothing is left is dropped."""
        for document in documents:
            if (fixed := self.fixed(document.text)) != document.text:
                document.text = fixed
                count.changed += 1
        return count.dropped_from(documents, lambda document: None if document.text.strip() else "empty")

    def fixed(self, text: str) -> str:
        """What `ftfy.fix_text` returns, without a call of it where it would change nothing."""
        if _PLAIN.fullmatch(text):
            return text
        if "&" in text:  # whether ftfy decodes an entity depends on the lines before
            return self._fix(text)
        lines = text.split("\n")
        lines = [line + "\n" for line in lines[:-1]] + lines[-1:]
        return "".join(line if _PLAIN.fullmatch(line) else self._fix(line) for line in lines)


class KeepLanguages:
    """Drops documents that are not in one of ``languages`` (ISO 639-1 codes), as py3langid tells them."""

    def __init__(self, languages: Sequence[str]) -> None:
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ImportError as error:
            raise UsageError(f"--languages needs py3langid: {INSTALL}") from error
        self._identifier: Any = LanguageIdentifier.from_model_file(MODEL_FILE)
        known = self._identifier.labels
        for language in languages:
            if language not in known:
                raise UsageError(f"--languages {language}: not known; valid: {', '.join(sorted(known))}")
        self._languages = frozenset(languages)

    def __call__(self, documents: list[Document], count: StageCount) -> list[Document]:
        """The documents in these languages; the language is the reason for which others are dropped."""

        def reason(document: Document) -> str | None:
            language = self._identifier.classify(document.text[:LANGUAGE_CHARACTERS])[0]
            return None if language in self._languages else f"language {language}"

        return count.dropped_from(documents, reason)


class DropShort:
    """Drops documents of fewer than ``least`` tokens, the end token included."""

    def __init__(self, tokenizer: Tokenizer, least: int) -> None:
        self._tokenizer, self._least = tokenizer, least
        # For a byte-level BPE with GPT-2's pattern, a word between white space is at least one token, and a byte at
        # most one.
        self._bounded = tokenizer.can_cut_text

    def __call__(self, documents: list[Document], count: StageCount) -> list[Document]:
        """The documents that are long enough. One is tokenised only where its bytes and words leave a doubt."""
        short, doubtful = set(), []
        for document in documents:
            if self._bounded:
                encoded = document.text.encode()
                if len(encoded) + 1 < self._least:
                    short.add(id(document))
                    continue
                if len(encoded.split()) + 1 >= self._least:
                    continue
            doubtful.append(document)
        ids = self._tokenizer.iter_encode_batch([document.text for document in doubtful])
        short |= {id(document) for document, found in zip(doubtful, ids, strict=True) if len(found) + 1 < self._least}
        reason = f"fewer than {self._least} tokens"
        return count.dropped_from(documents, lambda document: reason if id(document) in short else None)


def chosen_stages(settings: CorpusSettings) -> dict[str, Stage]:
    """The stages by their names, in their order. It reads the held-out files. Not collective.

    Raises UsageError, naming the option, where a file cannot be used or a library is missing.
    """
    stages: dict[str, Stage] = {}
    # Held-out texts are mended, too: a text and its copy must have the same words.
    mended: Callable[[str], str] = str
    if settings.fix_text:
        stages["fix"] = fix = FixText()
        mended = fix.fixed
    if settings.languages:
        stages["language"] = KeepLanguages(settings.languages)
    if settings.decontaminate:
        key = settings.json_key
        files = ((path, (mended(row[key]) for row in settings.rows(path))) for path in settings.decontaminate)
        with usage_errors("--decontaminate: "):
            stages["decontaminate"] = Decontaminate(files, settings.decontaminate_by, settings.decontaminate_share)
    tokenizer = settings.read_tokenizer()
    if tokenizer is not None and settings.min_tokens:
        stages["length"] = DropShort(tokenizer, settings.min_tokens)
    return stages
