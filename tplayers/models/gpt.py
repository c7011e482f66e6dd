"""GPT: a tensor-parallel decoder with tied embedding (paper, sections 3 and 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from commengine import Communicator, Stream
from tplayers.attention import DropoutMask, needed
from tplayers.block import TransformerBlock
from tplayers.cross_entropy import vocab_parallel_cross_entropy
from tplayers.embedding import VocabParallelEmbedding
from tplayers.norm import LayerNorm
from tplayers.placement import Normal, Placement, add_parameter, require_divisible
from tplayers.recompute import Recompute
from tplayers.rng import Randomness, dropout


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT; the defaults are the paper's.

    ffn_hidden_size: None for 4 * hidden_size. make_vocab_size_divisible_by: the vocabulary is padded to a multiple of
    this at every TP size, so that the model is the same at every TP size.
    sequence_parallel, recompute: as in `TransformerBlock`. They change how the model is computed, not its function.
    attention_dropout_mask: as in `SelfAttention`.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    ffn_hidden_size: int | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02
    layernorm_epsilon: float = 1e-5
    make_vocab_size_divisible_by: int = 1024
    sequence_parallel: bool = False
    recompute: Recompute = None
    attention_dropout_mask: DropoutMask = "position"

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def padded_vocab_size(self) -> int:
        """``vocab_size`` rounded up to a multiple of ``make_vocab_size_divisible_by`` (128 * 8 in the paper)."""
        return -(-self.vocab_size // self.make_vocab_size_divisible_by) * self.make_vocab_size_divisible_by

    def require_parallel(self, tensor: int, *, ranks: int | None = None) -> None:
        """Raise ValueError, with the sizes that would work, unless the model splits over ``tensor`` ranks.

        ranks: the ranks of the whole job, if known; ``tensor`` must divide this number, too.
        """
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}"
            )
        require_divisible(
            tensor, num_attention_heads=self.num_attention_heads, hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_size, padded_vocab_size=self.padded_vocab_size,
            **({} if ranks is None else {"ranks": ranks}),
        )  # fmt: skip


class GPT(nn.Module):
    """A decoder over ``comm``, the tensor group. Call `tplayers.initialize(model, seed)`, or load a checkpoint.

    forward(tokens) -> this rank's logits [b, s, padded vocabulary / comm.size];
    forward(tokens, labels) -> per-token losses float32 [b, s], equal on all ranks, 0 where a label is -100.

    tokens, labels: int64 [b, s], equal on all ranks of ``comm``, s at most ``max_position_embeddings``.
    randomness: needed in a training pass with dropout. Every rank must run forward and backward.
    overlap_stream: a stream of ``comm`` on which the backward of column-parallel layers communicates
        (`column_parallel_linear`).

    Inside, activations are [s, b, h], so that a sequence shard is contiguous.

    With sequence_parallel, ``comm.size`` must divide s (else ValueError), and after a backward the gradients of some
    parameters are partial: call `sum_partial_gradients(model, comm)`.
    """

    position_embedding: nn.Parameter

    def __init__(
        self,
        config: GPTConfig,
        comm: Communicator,
        *,
        overlap_stream: Stream | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config.require_parallel(comm.size)
        self.config = config
        self.comm = comm
        init = Normal(config.init_method_std)
        # The branches add up along the residual stream, so each starts smaller (Radford et al. 2019, section 2.3).
        output_init = Normal(config.init_method_std / math.sqrt(2 * config.num_layers))
        split: dict[str, Any] = {"sequence_parallel": config.sequence_parallel}
        self.embedding = VocabParallelEmbedding(
            config.padded_vocab_size, config.hidden_size, comm, overlap_stream=overlap_stream, init=init, dtype=dtype,
            **split,
        )  # fmt: skip
        positions = (config.max_position_embeddings, config.hidden_size)
        placement = Placement(positions, init, partial=config.sequence_parallel)
        add_parameter(self, "position_embedding", placement, dtype)
        self.layers = nn.ModuleList(
            TransformerBlock(
                config.hidden_size, config.num_attention_heads, config.ffn_size, comm,
                hidden_dropout=config.hidden_dropout, attention_dropout=config.attention_dropout,
                dropout_mask=config.attention_dropout_mask, eps=config.layernorm_epsilon,
                recompute=config.recompute, overlap_stream=overlap_stream,
                init=init, output_init=output_init, site=f"layers.{number}", dtype=dtype, **split,
            )
            for number in range(config.num_layers)
        )  # fmt: skip
        self.final_norm = LayerNorm(config.hidden_size, config.layernorm_epsilon, dtype=dtype, **split)

    def hidden_states(self, tokens: Tensor, randomness: Randomness | None = None) -> Tensor:
        """The final norm's output [s, b, h] for tokens [b, s]: equal on all ranks, or this rank's shard of it."""
        s = tokens.shape[1]
        if s > self.config.max_position_embeddings:
            raise ValueError(
                f"a sequence of {s} tokens exceeds max_position_embeddings={self.config.max_position_embeddings}"
            )
        first, end = 0, s
        if self.config.sequence_parallel:
            require_divisible(self.comm.size, sequence_length=s)
            first, end = self.comm.rank * s // self.comm.size, (self.comm.rank + 1) * s // self.comm.size
        x = self.embedding(tokens.t()) + self.position_embedding[first:end].unsqueeze(1)
        if self.training and self.config.hidden_dropout > 0:
            x = dropout(x, self.config.hidden_dropout, needed(randomness, "embedding").keys("embedding"), first)
        for layer in self.layers:
            x = layer(x, randomness)
        normed: Tensor = self.final_norm(x)
        return normed

    def forward(self, tokens: Tensor, labels: Tensor | None = None, randomness: Randomness | None = None) -> Tensor:
        logits = self.embedding.logits(self.hidden_states(tokens, randomness))  # [s, b, v / p]
        if labels is None:
            return logits.transpose(0, 1)
        losses = vocab_parallel_cross_entropy(
            logits, labels.t(), self.comm, vocab_size=self.config.vocab_size, overwrite=True
        )
        return losses.t()
