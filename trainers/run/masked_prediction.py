"""What a BERT puts in the place of masked tokens, and which order of sentences it sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tplayers import BERT, Randomness, vocab_parallel_argmax


class RightPredictions:
    """Not to be minimized: 1 for each masked token, and each order, that the model's best guess names, otherwise 0.

    An `Objective` for `trainers.run.evaluation.evaluate_sources`, on batches as BERT's objective takes them.
    """

    unit = "share/masked token"

    def __init__(self, *, binary_head: bool = True) -> None:
        self.names = ("masked_accuracy", "sop_accuracy") if binary_head else ("masked_accuracy",)

    def __call__(self, model: BERT, batch: Any, randomness: Randomness | None) -> tuple[Tensor, ...]:
        del randomness
        tokens, order = predict(model, batch.tokens, batch.token_types, batch.padding, batch.positions)
        right = (tokens == batch.labels).float()  # a label that does not count is no token
        return (right,) if order is None else (right, (order == batch.order_labels).float())


def predict(
    model: BERT, tokens: Tensor, token_types: Tensor | None, padding: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The most likely token at each of ``positions``, int64 [b, K], and the most likely order, int64 [b].

    The order is 1 where the model holds the parts to be swapped, and None without a sentence-order head. The arguments
    are those of `tplayers.BERT`. Columns that only pad the vocabulary are never chosen; of equal logits, the lower id
    is. Collective over the model's tensor group, with the same arguments and results on every rank. Leaves the model
    in the mode that it is in.
    """
    with torch.no_grad():
        logits, order = model(tokens, token_types, padding, positions=positions)
    best = vocab_parallel_argmax(logits, model.comm, model.config.vocab_size)
    return best, None if order is None else order.argmax(dim=-1)


def filled(tokens: Sequence[str], predicted: Mapping[int, str], truth: Mapping[int, str]) -> tuple[str, str]:
    """A text with its masks, and with what the model puts there: ``[word]``, or ``[word, not truth]`` where it errs.

    tokens: as the model sees them. predicted, truth: the tokens at the masked positions.
    """
    shown = list(tokens)
    for n, right in truth.items():
        shown[n] = f"[{right}]" if predicted[n] == right else f"[{predicted[n]}, not {right}]"
    return _joined(tokens), _joined(shown)


def _joined(tokens: Sequence[str]) -> str:
    return "".join(token[2:] if token.startswith("##") else f" {token}" for token in tokens).strip()
