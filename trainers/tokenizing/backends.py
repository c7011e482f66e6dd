"""The tokenizers of five classes of transformers 5, built from a vocabulary, merges and settings.

Sources: what ``GPT2Tokenizer``, ``Qwen2Tokenizer``, ``LlamaTokenizer``, ``BertTokenizer`` and ``T5Tokenizer`` give in
transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from . import classes
from .settings import Settings

BLANK = "\u2581"
#: how Qwen 2 cuts text: contractions, words with one sign before them, single digits, signs, ends of lines, blanks
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END = "<|endoftext|>"


@dataclass(frozen=True)
class TokenizerClass:
    """A class of tokenizers. model: the kind of model in its tokenizer.json. tokens: those that it names by itself."""

    model: str
    tokens: Mapping[str, str | None]
    build: Callable[[Any, Sequence[tuple[str, str]], Settings], tokenizers.Tokenizer]


def _gpt2(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], settings: Settings) -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(
        models.BPE(dict(vocabulary), list(merges), continuing_subword_prefix="", end_of_word_suffix="")
    )
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.flag("add_prefix_space", False)))
    found.decoder = decoders.ByteLevel()
    return found


def _qwen2(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], settings: Settings
) -> tokenizers.Tokenizer:
    found = _gpt2(vocabulary, merges, settings)
    found.normalizer = normalizers.NFC()
    prefix = bool(settings.flag("add_prefix_space", False))
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
    )
    return found


def _llama(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], settings: Settings
) -> tokenizers.Tokenizer:
    prefix = settings.flag("add_prefix_space", None) is not False
    scheme = ("always" if settings.flag("legacy", False) else "first") if prefix else "never"
    found = tokenizers.Tokenizer(models.BPE(dict(vocabulary), list(merges), fuse_unk=True, byte_fallback=True))
    found.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    found.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return found


def _bert(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], settings: Settings) -> tokenizers.Tokenizer:
    del merges
    unknown = str(settings.values["unk_token"])
    found = tokenizers.Tokenizer(models.WordPiece(dict(vocabulary), unk_token=unknown))
    found.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=settings.must("tokenize_chinese_chars", True),
        strip_accents=settings.flag("strip_accents", None), lowercase=settings.must("do_lower_case", True),
    )  # fmt: skip
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.decoder = decoders.WordPiece(prefix="##")
    return found


def _t5(
    vocabulary: Sequence[tuple[str, float]], merges: Sequence[tuple[str, str]], settings: Settings
) -> tokenizers.Tokenizer:
    del merges
    found = tokenizers.Tokenizer(models.Unigram([(token, score) for token, score in vocabulary], 2, False))
    marks: dict[str, Any] = {"replacement": BLANK, "prepend_scheme": "always", "split": True}
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**marks)]
    found.pre_tokenizer, found.decoder = pre_tokenizers.Sequence(words), decoders.Metaspace(**marks)
    given = settings.values.get("additional_special_tokens") or []
    if "extra_special_tokens" not in settings.values and not any("<extra_id_" in str(one) for one in given):
        more = [f"<extra_id_{number}>" for number in range(settings.values.get("extra_ids", 100))]
        settings.values["extra_special_tokens"] = [*given, *more]
    return found


def t5_frame(backend: tokenizers.Tokenizer, settings: Settings) -> None:
    """Put the end after a text."""
    end = backend.token_to_id(str(settings.values["eos_token"]))
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", end)]
    )


def bert_frame(backend: tokenizers.Tokenizer, settings: Settings) -> None:
    """Put [CLS] before a text and [SEP] after it, or the tokens of these names."""
    start, end = str(settings.values["cls_token"]), str(settings.values["sep_token"])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start}:0 $A:0 {end}:0", pair=f"{start}:0 $A:0 {end}:0 $B:1 {end}:1",
        special_tokens=[(one, backend.token_to_id(one)) for one in (start, end)],
    )  # fmt: skip


_ENDS = {"unk_token": _END, "bos_token": _END, "eos_token": _END}
KINDS = {
    classes.GPT2: TokenizerClass("BPE", _ENDS | {"pad_token": None}, _gpt2),
    classes.QWEN2: TokenizerClass("BPE", _ENDS | {"bos_token": None, "pad_token": _END}, _qwen2),
    classes.LLAMA: TokenizerClass("BPE", {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, _llama),
    classes.BERT: TokenizerClass(
        "WordPiece",
        {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")},
        _bert,
    ),
    classes.T5: TokenizerClass("Unigram", {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}, _t5),
}
