"""The tokenizer's files in a folder of Hugging Face, read for a run and written for transformers."""

from __future__ import annotations

import json
from pathlib import Path

from trainers.data.tokenizer import Tokenizer
from trainers.data.wordpiece import SPECIAL

TOKENIZER, TOKENIZER_CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"

#: the files of a folder beside config.json and the weights that an export repeats
COPIED = (
    TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "vocab.txt", "tokenizer.model", "spiece.model", GENERATION, "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip

#: files of tokenizers of other libraries
_UNREAD = ("*.model", "*.model.v*", "tekken.json", "*.tiktoken")


def tokenizer_file(folder: Path) -> str | None:
    """The file of ``folder`` that `Tokenizer.from_file` reads; None if there is none."""
    for name in (TOKENIZER, "vocab.txt", "vocab.json"):
        if (folder / name).is_file():
            return str(folder / name)
    return None


def without_tokenizer(folder: Path) -> str:
    """Why `tokenizer_file` finds none in ``folder``, for people."""
    unread = sorted(path.name for pattern in _UNREAD for path in folder.glob(pattern))
    if not unread:
        return f"{folder} has no tokenizer: no {TOKENIZER}, vocab.txt or vocab.json"
    convert = f'AutoTokenizer.from_pretrained("{folder}").save_pretrained(...) of transformers writes a {TOKENIZER}'
    return f"{folder} has its tokenizer in {', '.join(unread)} alone, which is not read here; {convert}"


def end_of_text(model: str | None) -> int | None:
    """The token that ends a text, of the tokenizer in the file ``model``; None if there is none."""
    tokenizer = None if model is None else Tokenizer.from_file(model)
    return None if tokenizer is None or tokenizer.end_token is None else tokenizer.eod


def written_tokenizer(model: str, sentinels: int = 0, vocab_size: int | None = None) -> dict[str, bytes]:
    """The files, by name, with which ``AutoTokenizer`` gives the ids of the tokenizer in the file ``model``.

    sentinels, vocab_size: see `Tokenizer.with_sentinels`. Raises ValueError and OSError as `Tokenizer.from_file` does.
    """
    found = Tokenizer.from_file(model).with_sentinels(sentinels, vocab_size)
    about = found.settings()
    if about is None:
        vocabulary = found.vocabulary()
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if found.end_token is not None:
            about |= {"bos_token": found.start_token, "eos_token": found.end_token}
        if all(token in vocabulary for token in SPECIAL):
            about |= {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
    return {TOKENIZER: found.to_bytes(), TOKENIZER_CONFIG: json.dumps(about, indent=2).encode()}
