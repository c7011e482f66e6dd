"""The texts that are scored: read and encoded on rank 0, and sent as tokens to all ranks; and how words are counted."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from commengine import Communicator, UsageError
from commengine.errors import usage_errors
from commengine.files.reading import require_regular
from commengine.rank_zero import broadcast_json, on_rank_zero
from trainers.data import text_files
from trainers.data.blend import blend_of
from trainers.data.indexed import IndexedDataset
from trainers.data.same_data import KnownData, found_among, written_after_checksums, written_since
from trainers.data.samples import split_documents
from trainers.data.stream import SourceRecord
from trainers.data.text_files import TextPiece
from trainers.data.tokenizer import Tokenizer
from trainers.settings.commands import TransformerSettings

from .passages import Tokens

#: in order, from Megatron-LM's `wikitext_detokenizer` (tasks/zeroshot_gpt/detokenizer.py), a pattern and its
#: replacement. lm-evaluation-harness has the same function. Neither can be inverted.
_WIKITEXT = [
    (re.escape("s '"), "s'"), (r"/' [0-9]/", r"/'[0-9]/"),
    (" @-@ ", "-"), (" @,@ ", ","), (re.escape(" @.@ "), "."),
    (" : ", ": "), (" ; ", "; "), (re.escape(" . "), ". "), (" ! ", "! "), (re.escape(" ? "), "? "), (" , ", ", "),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"), (r"\[\s*([^\]]*?)\s*\]", r"[\1]"), (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'), (r"'\s*([^']*?)\s*'", r"'\1'"),
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°"), (" \n", "\n"), ("\n ", "\n"),
    (" N ", " 1 "), (" 's", "'s"),
]  # fmt: skip


def detokenized_wikitext(text: str) -> str:
    """WikiText's text with punctuation where a writer puts it."""
    for pattern, replacement in _WIKITEXT:
        text = re.sub(pattern, replacement, text)
    return text


def paper_words(text: str) -> int:
    """The words of a text as Megatron-LM counts them (the paper's T_o, equation 4): what single spaces separate."""
    return len(text.strip().split(" "))


def harness_words(text: str) -> int:
    """The words of a document as lm-evaluation-harness counts them: what white space separates."""
    return len(re.split(r"\s+", text))


def wikitext_documents(text: str) -> list[str]:
    """WikiText's articles, as the data set of lm-evaluation-harness has them: a line "= Title =" begins one."""
    found: list[str] = []
    lines: list[str] = []
    for line in text.split("\n"):
        short = line.replace("= = =", "===").replace("= =", "==").strip()
        if short.startswith("= ") and short.endswith(" ="):
            found.append("\n".join(lines))
            lines = []
        lines.append(line)
    return [one for one in (*found, "\n".join(lines)) if one.strip()]


def perplexity(nll: float, items: int) -> float:
    """exp(nll / items); infinity where a float has no room for it, NaN for no items."""
    if not items:
        return math.nan
    try:
        return math.exp(nll / items)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class TextCounts:
    """What the texts of a task hold.

    texts: how many there are. words: as the paper counts them (`paper_words`). harness_words: as lm-evaluation-harness
    counts them. Both are of the text before it is detokenized, and 0 where the text is not known. tokens: after.
    """

    texts: int
    words: int
    harness_words: int
    tokens: int


class Texts(NamedTuple):
    """The tokens of each text, int32, on every rank, and what the texts hold."""

    tokens: list[Tokens]
    counts: TextCounts


def read_whole(path: str, tokenizer: Tokenizer, *, wikitext: bool) -> Texts:
    """A file as one text. wikitext: it is WikiText's raw text, and is detokenized.

    Raises ValueError that names the file if it has no text or is not UTF-8, and OSError.
    """
    text = "".join(piece.text for piece in text_files.read_text(require_regular(path)))
    if not text.strip():
        raise ValueError(f"{path}: has no text")
    tokens = encoded(tokenizer, detokenized_wikitext(text) if wikitext else text)
    harness = sum(map(harness_words, wikitext_documents(text) if wikitext else [text]))
    return Texts([tokens], TextCounts(1, paper_words(text), harness, len(tokens)))


def read_json_lines(path: str, key: str, tokenizer: Tokenizer) -> Texts:
    """A file with a text in each line, under ``key`` of a JSON object. Raises ValueError that names the line.

    The words of a text without a target, which has fewer than two tokens, are not counted.
    """
    texts = [piece.text for piece in text_files.read_json_lines(require_regular(path), key)]
    if not texts:
        raise ValueError(f"{path}: has no text")
    tokens: list[Tokens] = [np.array(ids, dtype=np.int32) for ids in tokenizer.iter_encode_batch(texts)]
    scored = [text for text, ids in zip(texts, tokens, strict=True) if len(ids) > 1]
    counts = TextCounts(
        len(texts), sum(map(paper_words, scored)), sum(map(harness_words, scored)), sum(len(ids) for ids in tokens)
    )
    return Texts(tokens, counts)


def read_held_out(
    settings: TransformerSettings, tokenizer: Tokenizer | None, sources: Sequence[SourceRecord] = ()
) -> Texts:
    """The validation documents of a run, those of each data set one after the other as one text, as it trained on them.

    tokenizer: for the number of words; None for none. sources: what is known of each data set that the run has read.
    Raises UsageError if there are no documents, or those of other data.
    """
    blend = blend_of(settings)
    if not blend:
        why = "the run was trained on --mock-data"
        if not settings.mock_data:
            why = "the model was trained by another program, which does not say on which documents"
        raise UsageError(f"--task held-out: {why}; valid tasks have a --data FILE")
    tokens: list[Tokens] = []
    words = harness = 0
    for weight, prefix in blend:
        if not weight:
            continue
        dataset = IndexedDataset(prefix)
        _require_trained_on(KnownData.of(dataset), sources)
        if (line := written_after_checksums(prefix)) is not None:
            _say(line)
        documents = split_documents(len(dataset), settings.split)[1]
        parts = [dataset.document(number) for number in documents]
        if parts:
            tokens.append(np.concatenate(parts).astype(np.int32))
        if tokenizer is not None:
            decoded = [tokenizer.decode([int(token) for token in part]) for part in parts]
            plain = [text.removesuffix(tokenizer.end_token or "") for text in decoded]
            words += sum(map(paper_words, plain))
            harness += sum(map(harness_words, plain))
    assert settings.vocab_size is not None
    if not sum(map(len, tokens)):
        raise UsageError(f"--task held-out: --split {settings.split} of the run leaves no validation documents")
    if max(int(one.max(initial=0)) for one in tokens) >= settings.vocab_size:
        raise UsageError(
            f"--task held-out: a token of --data-path lies outside the run's vocabulary of {settings.vocab_size}: was "
            "the data set replaced since?"
        )
    return Texts(tokens, TextCounts(len(tokens), words, harness, sum(map(len, tokens))))


def _require_trained_on(now: KnownData, sources: Sequence[SourceRecord]) -> None:
    """Raise UsageError if a run that has read ``sources`` knows a data set of this name, and not this one.

    It says on standard error where the files were written since.
    """
    known = [source for source in sources if source.name == now.name]
    same = found_among(now, known)
    if known and same is None:
        found, before = (f"(identity {one.identity} {one.checksums}".strip() + ")" for one in (now, known[-1]))
        raise UsageError(
            f"--task held-out: {now.name} holds other data {found} than the run was trained on {before}: was it "
            "replaced since? --task perplexity scores any text"
        )
    if same is not None and (line := written_since(now, same)) is not None:
        _say(line)


def _say(line: str) -> None:
    print(f"--task held-out: {line}", file=sys.stderr, flush=True)


def encoded(tokenizer: Tokenizer, text: str) -> Tokens:
    """The tokens of a text, int32, encoded whole and without special tokens; on several threads where that can be."""
    pieces: Iterable[str] = [text]
    if tokenizer.can_cut_text:
        pieces = [piece.text for piece in text_files.cut([TextPiece(text, True, 0)])]
    parts = [np.array(ids, dtype=np.int32) for ids in tokenizer.iter_encode_batch(list(pieces))]
    return np.concatenate(parts)


def on_all_ranks(world: Communicator, option: str, read: Callable[[], Texts]) -> Texts:
    """The texts that ``read`` gives on rank 0, on every rank. Collective over ``world``.

    option: stands before the file's name in the message about an error in a file. Raises UsageError, on all ranks,
    if ``read`` raises UsageError, ValueError or OSError.
    """
    kept: list[Tokens] = []

    def work() -> dict[str, Any]:
        with usage_errors(f"{option} "):
            tokens, counts = read()
        kept.extend(tokens)
        return asdict(counts)

    counts = on_rank_zero(world, work)
    return Texts(broadcast_tokens(world, kept), TextCounts(**counts))


def broadcast_tokens(world: Communicator, tokens: Sequence[Tokens]) -> list[Tokens]:
    """Rank 0's arrays of tokens, int32, on every rank. Collective over ``world``; the other ranks' are not read."""
    lengths = broadcast_json(world, [len(one) for one in tokens])
    flat = torch.zeros(sum(lengths), dtype=torch.int32)
    if not len(flat):
        return [np.zeros(0, dtype=np.int32) for _ in lengths]
    if world.rank == 0:
        flat = torch.from_numpy(np.concatenate(tokens).astype(np.int32))
    world.broadcast(flat)
    return np.split(flat.numpy(), np.cumsum(lengths)[:-1])
