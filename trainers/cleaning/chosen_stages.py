"""The stages that look at one document at a time, as the settings of a corpus choose them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from commengine import UsageError

from .documents import Stage
from .filters import DropShort, FixText, KeepLanguages
from .held_out import Decontaminate, HeldOutTexts
from .input_blocks import Rows, blocks
from .settings import CorpusSettings


def chosen_stages(settings: CorpusSettings, rows: Rows) -> list[Stage]:
    """The stages in their order. It reads the held-out files. Not collective.

    rows: of the files. Raises UsageError, naming the option, where a file cannot be used or a library is missing.
    """
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
        files = ((path, map(mended, _texts_of(path, rows))) for path in settings.decontaminate)
        try:
            held_out = HeldOutTexts(files)
        except ValueError as error:
            raise UsageError(f"--decontaminate: {error}") from error
        stages.append(Decontaminate(held_out, settings.decontaminate_by, settings.decontaminate_share))
    tokenizer = settings.tokenizer()
    if tokenizer is not None and settings.min_tokens:
        stages.append(DropShort(tokenizer, settings.min_tokens))
    return stages


def _texts_of(path: str, rows: Rows) -> Iterator[str]:
    for block in blocks([path], rows, sys.maxsize):
        for row in rows.read(block):
            yield row[rows.key]
