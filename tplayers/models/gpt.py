"""GPT: a tensor-parallel decoder with tied embedding (paper, sections 3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commengine import Communicator, Stream
from tplayers.cross_entropy import vocab_parallel_cross_entropy
from tplayers.key_value_cache import KeyValueCache
from tplayers.rng import Randomness

from .transformer import Transformer, TransformerConfig


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """The shape of a GPT: see `TransformerConfig`."""


class GPT(Transformer):
    """A decoder over ``comm``, the tensor group. Call `tplayers.initialize(model, seed)`, or load a checkpoint.

    forward(tokens) -> this rank's logits [b, s, padded vocabulary / comm.size];
    forward(tokens, labels) -> per-token losses float32 [b, s], equal on all ranks, 0 where a label is -100.

    tokens, labels: int64 [b, s], equal on all ranks of ``comm``, s at most ``max_position_embeddings``.
    randomness: needed in a training pass with dropout. Every rank must run forward and backward.
    cache: the tokens before ``tokens``, which go through the model without them (`Transformer.hidden_states`).
    overlap_stream: a stream of ``comm`` on which the backward of column-parallel layers communicates
        (`column_parallel_linear`).

    Layers are pre-LN, and GELU is the tanh form. Inside, activations are [s, b, h], so that a sequence shard is
    contiguous.

    With sequence_parallel, ``comm.size`` must divide s (else ValueError), and after a backward the gradients of some
    parameters are partial: call `sum_partial_gradients(model, comm)`.
    """

    def __init__(
        self,
        config: GPTConfig,
        comm: Communicator,
        *,
        overlap_stream: Stream | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, comm, causal=True, overlap_stream=overlap_stream, dtype=dtype)
        self.config = config

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        randomness: Randomness | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        logits = self.embedding.logits(self.hidden_states(tokens, randomness, cache=cache))  # [s, b, v / p]
        if labels is None:
            return logits.transpose(0, 1)
        losses = vocab_parallel_cross_entropy(
            logits, labels.t(), self.comm, vocab_size=self.config.vocab_size, overwrite=True
        )
        return losses.t()
