"""The tokenizer of a run: the one that its settings name, or another one that fits its model."""

from __future__ import annotations

import os

from commengine import UsageError
from trainers.data.tokenizer import Tokenizer

from .transformer import TransformerTrainConfig


def tokenizer_of(
    settings: TransformerTrainConfig, asked: str | os.PathLike[str] | None, vocabulary: str | None = None
) -> Tokenizer:
    """The tokenizer ``asked`` for, or the run's. Raises UsageError if there is none, or none for this vocabulary.

    vocabulary: the `Tokenizer.identity` of the run's, which must still be that of its file; None if it is not known.
    """
    path = settings.tokenizer_model if asked is None else os.fspath(asked)
    other = "name one with --tokenizer-model FILE"
    if path is None:
        raise UsageError(f"--load: the run has no tokenizer, because it was trained on token ids alone; {other}")
    try:
        found = Tokenizer.from_file(path)
    except (OSError, ValueError) as error:
        hint = f"; if the run's tokenizer has moved, {other}" if asked is None else ""
        raise UsageError(f"--tokenizer-model: {error}{hint}") from error
    require_vocabulary(found, path, settings.vocab_size)
    if asked is None and vocabulary not in (None, found.identity()):
        raise UsageError(
            f"--tokenizer-model: {path}: has another vocabulary than the tokenizer of that name with which the run was "
            "trained: was it replaced since? Name the run's own with --tokenizer-model FILE"
        )
    return found


def require_vocabulary(tokenizer: Tokenizer, path: str, vocab_size: int | None) -> None:
    """Raise UsageError unless a model with ``vocab_size`` tokens has all those of the tokenizer in ``path``."""
    assert vocab_size is not None
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"--tokenizer-model {path}: has {tokenizer.vocab_size} tokens, and the model only {vocab_size}"
        )
