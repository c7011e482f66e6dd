"""BERT with the heads of fine-tuning: classes of a sample, one of several choices, spans (paper, section 5.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commengine import Communicator
from tplayers.attention.self_attention import needed
from tplayers.linear import ReplicatedLinear
from tplayers.placement import Normal
from tplayers.regions import gather_from_tensor_parallel_region
from tplayers.rng import Randomness, dropout

from .bert import BERTConfig, BERTEncoder


class BERTSequenceClassifier(BERTEncoder):
    """An encoder, the pooler, and a linear layer to ``classes`` logits (Devlin et al. 2019, figure 4 a).

    forward -> logits [b, classes], equal on all ranks of ``comm``. ``tplayers.class_cross_entropy`` gives losses.

    tokens, token_types, padding: as in `BERT`. randomness: needed in a training pass with dropout; ``hidden_dropout``
    is also applied to the pooled vector. Every rank must run forward and backward.

    The parameters of the encoder and the pooler have the names that they have in `BERT`. The model has no head of
    masked tokens, because every parameter must get a gradient.
    """

    def __init__(self, config: BERTConfig, comm: Communicator, *, classes: int, **options: Any) -> None:
        self.classes = classes
        super().__init__(config, comm, **options)

    def add_heads(self, dtype: torch.dtype | None) -> None:
        self.add_pooler(dtype)
        init = Normal(self.config.init_method_std)
        self.classifier = ReplicatedLinear(self.config.hidden_size, self.classes, init=init, dtype=dtype)

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor | None = None,
        padding: Tensor | None = None,
        *,
        randomness: Randomness | None = None,
    ) -> Tensor:
        pooled = self.pooled(self.hidden_states(tokens, randomness, token_types, padding))
        p = self.config.hidden_dropout
        if self.training and p > 0:
            pooled = dropout(pooled.unsqueeze(0), p, needed(randomness, "classifier").keys("classifier"))[0]
        logits: Tensor = self.classifier(pooled)
        return logits


class BERTMultipleChoice(BERTSequenceClassifier):
    """An encoder, the pooler, and one score for each choice of a question.

    forward -> scores [b, c], equal on all ranks of ``comm``; a softmax over the choices gives their probabilities.

    tokens, token_types: int64 [b, c, s]: c choices for each of b questions. padding: int64 [b, c], the real tokens of
    each, or bool [b, c, s], True where a token is real. randomness: of b * c samples, those of a question in a row; see
    `BERTSequenceClassifier`.
    """

    def __init__(self, config: BERTConfig, comm: Communicator, **options: Any) -> None:
        super().__init__(config, comm, classes=1, **options)

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor | None = None,
        padding: Tensor | None = None,
        *,
        randomness: Randomness | None = None,
    ) -> Tensor:
        flat = [None if x is None else x.flatten(0, 1) for x in (token_types, padding)]
        scores = super().forward(tokens.flatten(0, 1), *flat, randomness=randomness)
        return scores.view(tokens.shape[:2])


class BERTSpans(BERTEncoder):
    """An encoder, and a linear layer that says how well a span begins, and ends, at each token.

    forward -> logits [b, s, 2], of begins and of ends, equal on all ranks of ``comm``. They are not masked: tokens that
    cannot be part of an answer have logits, too. tokens, token_types, padding, randomness: as in `BERT`.
    """

    def add_heads(self, dtype: torch.dtype | None) -> None:
        init, split = Normal(self.config.init_method_std), self.config.sequence_parallel
        self.span_head = ReplicatedLinear(self.config.hidden_size, 2, sequence_parallel=split, init=init, dtype=dtype)

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor | None = None,
        padding: Tensor | None = None,
        *,
        randomness: Randomness | None = None,
    ) -> Tensor:
        logits: Tensor = self.span_head(self.hidden_states(tokens, randomness, token_types, padding))
        if self.config.sequence_parallel:
            # Every rank computes the same with the whole, so a rank's part of the gradient is that of its shard.
            logits = gather_from_tensor_parallel_region(logits, self.comm, dim=0)
        return logits.transpose(0, 1)
