"""The tokenizer's files in a folder of Hugging Face, read for a run and written for transformers."""

from __future__ import annotations

import json
from pathlib import Path

from trainers.data.tokenizer import Tokenizer, merges_of
from trainers.data.wordpiece import SPECIAL

TOKENIZER, TOKENIZER_CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"

#: the files of a folder beside config.json and the weights that an export repeats
COPIED = (
    TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "vocab.txt", "tokenizer.model", "spiece.model", GENERATION, "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


def tokenizer_file(folder: Path) -> str | None:
    """The file of ``folder`` that `Tokenizer.from_file` reads; None if there is none."""
    for name in (TOKENIZER, "vocab.txt", "vocab.json"):
        if (folder / name).is_file():
            return str(folder / name)
    return None


def end_of_text(model: str | None) -> int | None:
    """The token that ends a text, of the tokenizer in the file ``model``; None if there is none."""
    tokenizer = None if model is None else Tokenizer.from_file(model)
    return None if tokenizer is None or tokenizer.end_token is None else tokenizer.eod


def written_tokenizer(model: str) -> dict[str, bytes]:
    """The files, by name, with which ``AutoTokenizer`` gives the ids of the tokenizer in the file ``model``.

    Raises ValueError and OSError as `Tokenizer.from_file` does.
    """
    found = Tokenizer.from_file(model)
    whole = model.endswith(".json") and merges_of(model) is None
    content = Path(model).read_bytes() if whole else found.to_bytes()
    vocabulary = found.vocabulary()
    about: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if found.end_token is not None:
        about |= {"bos_token": found.start_token, "eos_token": found.end_token}
    if all(token in vocabulary for token in SPECIAL):
        about |= {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
    return {TOKENIZER: content, TOKENIZER_CONFIG: json.dumps(about, indent=2).encode()}
