"""A tokenizer as Llama 2 and Mistral have it: a blank before each text, bytes of unknown characters, <s> and </s>."""

import json
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

BLANK = "\u2581"
SPECIAL = ["<unk>", "<s>", "</s>"]


def sentencepiece(texts: Iterable[str], vocab_size: int, *, start: bool = True) -> tokenizers.Tokenizer:
    """Trained on ``texts``. vocab_size: without the 256 bytes. start: <s> is put before each text, as Llama 2 does."""
    learning = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    learning.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, show_progress=False)
    learning.train_from_iterator(texts, trainer)
    learnt = json.loads(learning.to_str())["model"]
    vocabulary = dict(learnt["vocab"])
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    merges = [tuple(pair) for pair in learnt["merges"]]
    found = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
    found.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found.add_special_tokens(SPECIAL)
    if start:
        found.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", vocabulary["<s>"])])
    return found
