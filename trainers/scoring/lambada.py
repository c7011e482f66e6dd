"""LAMBADA: the last word of a passage, which only its whole context tells (paper, section 5.1, appendix E.2).

Two accuracies go by this name. *Strict*: the context without its last word, white space at its end removed, and then
a space and the word; all tokens of the word must be the model's most likely ones. Both are encoded as one text, because
some tokenizers put a blank before every text. *Last token*: the
whole text is encoded, and its last token alone must be. The published figures differ because of this, and because of
the text, which is OpenAI's JSON lines or the data set's own plain lines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainers.checkpoints import disk
from trainers.data.tokenizer import Tokenizer

from .passages import Passage, Tokens


@dataclass(frozen=True)
class LastWord:
    """One example: the same text encoded in both ways, of which the last tokens are targets.

    strict: the passage of the last word. last: the passage of the last token. cut: whether one of them lost tokens at
    its beginning.
    """

    strict: Passage
    last: Passage
    cut: bool


def encoded(texts: Sequence[tuple[str, str]], tokenizer: Tokenizer, length: int) -> list[tuple[Tokens, Tokens, Tokens]]:
    """(Context, last word, whole text) of each example as tokens, int32.

    texts: as `trainers.data.text_files.read_lines` gives them. White space at the end of a text does not count. Raises
    ValueError, which names the place, for a text without a word before the last
    one, and for a last word that leaves no room for a token before it. length: the most tokens that the model reads.
    """
    contexts, joined, wholes = [], [], []
    for where, text in texts:
        whole = text.rstrip()
        word = whole.split()[-1] if whole else ""  # a line of JSON may have a blank text
        context = whole.removesuffix(word)
        if not context.strip():
            raise ValueError(f"{where}: want a text and its last word, got {text.strip()[:40]!r}")
        contexts.append(context.strip())
        joined.append(f"{context.strip()} {word}")
        wholes.append(whole)
    rows: list[tuple[Tokens, Tokens, Tokens]] = []
    encoded_whole = tokenizer.encode_batch(wholes)
    for (where, _), context, (ids, offsets), last in zip(
        texts, contexts, tokenizer.encode_with_offsets(joined), encoded_whole, strict=True
    ):
        # The first token of the word, or of the blank before it.
        first = next((n for n, (_, end) in enumerate(offsets) if end > len(context)), None)
        if first is None:
            raise ValueError(f"{where}: the tokenizer has no token of its last word")
        before, word_ids, all_ids = (np.array(part, dtype=np.int32) for part in (ids[:first], ids[first:], last))
        if len(word_ids) > length:
            raise ValueError(f"{where}: its last word has {len(word_ids)} tokens, and the model reads {length}")
        rows.append((before, word_ids, all_ids))
    return rows


def examples(rows: Sequence[tuple[Tokens, Tokens, Tokens]], length: int) -> list[LastWord]:
    """The examples, as `encoded` gives them, with as much of their context as ``length`` tokens hold."""
    found = []
    for context, word, whole in rows:
        joined = np.concatenate([context, word])
        cut = max(len(joined), len(whole)) > length + 1
        found.append(LastWord(Passage(joined[-length - 1 :], len(word)), Passage(whole[-length - 1 :], 1), cut))
    return found


def distinct(found: Sequence[LastWord]) -> tuple[list[Passage], list[tuple[int, int]]]:
    """The passages to score, each once, and for each example the numbers of its strict and its last-token passage.

    Mostly both are one: the last token of the word's passage is then that of the text.
    """
    passages: list[Passage] = []
    numbers = []
    for example in found:
        passages.append(example.strict)
        strict = last = len(passages) - 1
        if not np.array_equal(example.strict.tokens, example.last.tokens):
            passages.append(example.last)
            last += 1
        numbers.append((strict, last))
    return passages, numbers


def save_predictions(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a JSON object a line. Raises OSError."""
    disk.rewrite(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
