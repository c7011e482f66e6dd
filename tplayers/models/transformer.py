"""Transformer: the embedding and the layers that GPT and BERT share (paper, section 3)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from commengine import Communicator, Stream
from tplayers.attention.key_value_cache import KeyValueCache
from tplayers.attention.rotary import Rotation, frequencies, rotation
from tplayers.attention.self_attention import SelfAttention, needed, real_tokens
from tplayers.block import NormPlacement, TransformerBlock
from tplayers.canonical.shards import CanonicalShards
from tplayers.checks import require_within
from tplayers.embedding import VocabParallelEmbedding, looked_up
from tplayers.mlp import Gelu
from tplayers.norm import NORMS, LayerNorm, RMSNorm
from tplayers.placement import Normal, Placement, add_parameter, require_divisible
from tplayers.regions import scatter_to_tensor_parallel_region
from tplayers.rng import Randomness, dropout

from .config import TransformerConfig


class Transformer(nn.Module):
    """The embedding and the layers over ``comm``, the tensor group. `GPT` and `BERT` add what they compute from it.

    causal, gelu, norm_placement: of every layer (`TransformerBlock`). After pre-LN layers a final norm follows; before
        post-LN layers the sum of the embeddings is normalised instead.
    num_tokentypes: rows of the table of token types; 0 for no table.
    overlap_stream: a stream of ``comm`` on which the backward of column-parallel layers communicates
        (`column_parallel_linear`).

    Inside, activations are [s, b, h], so that a sequence shard is contiguous.
    """

    canonical: CanonicalShards | None = None
    position_embedding: nn.Parameter  # if positions are learned
    token_type_embedding: nn.Parameter  # if there are token types
    embedding_norm: LayerNorm | RMSNorm  # in a post-LN model
    final_norm: LayerNorm | RMSNorm  # in a pre-LN model

    def __init__(
        self,
        config: TransformerConfig,
        comm: Communicator,
        *,
        causal: bool,
        gelu: Gelu = "tanh",
        norm_placement: NormPlacement = "pre",
        num_tokentypes: int = 0,
        overlap_stream: Stream | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config.require_parallel(comm.size)
        self.comm = comm
        self._sizes = config
        self.causal = causal
        self.sequence_parallel = config.sequence_parallel
        self._num_tokentypes = num_tokentypes
        self._norm_placement = norm_placement
        hidden, eps, norm = config.hidden_size, config.norm_epsilon, NORMS[config.normalization]
        init = Normal(config.init_method_std)
        # The branches add up along the residual stream, so each starts smaller (Radford et al. 2019, section 2.3).
        output_init = Normal(config.init_method_std / math.sqrt(2 * config.num_layers))
        split: dict[str, Any] = {"sequence_parallel": config.sequence_parallel}
        self.embedding = VocabParallelEmbedding(
            config.padded_vocab_size, hidden, comm, overlap_stream=overlap_stream, init=init, dtype=dtype, **split
        )
        self._rotary = config.position_embedding_type == "rope"
        if not self._rotary:
            positions = Placement((config.max_position_embeddings, hidden), init, partial=config.sequence_parallel)
            add_parameter(self, "position_embedding", positions, dtype)
        if num_tokentypes:
            types = Placement((num_tokentypes, hidden), init, partial=config.sequence_parallel)
            add_parameter(self, "token_type_embedding", types, dtype)
        if norm_placement == "post":
            self.embedding_norm = norm(hidden, eps, dtype=dtype, **split)
        self.layers = nn.ModuleList(
            TransformerBlock(
                hidden, config.num_attention_heads, config.ffn_size, comm, causal=causal,
                head_size=config.head_size, query_groups=config.query_groups,
                pad_heads=config.pad_attention_heads, bias=config.add_bias_linear,
                qkv_bias=config.qkv_bias, gelu=gelu, swiglu=config.swiglu, normalization=config.normalization,
                norm_placement=norm_placement, hidden_dropout=config.hidden_dropout,
                attention_dropout=config.attention_dropout, dropout_mask=config.attention_dropout_mask, eps=eps,
                recompute=config.recompute, overlap_stream=overlap_stream,
                init=init, output_init=output_init, site=f"layers.{number}", dtype=dtype, **split,
            )
            for number in range(config.num_layers)
        )  # fmt: skip
        if norm_placement == "pre":
            self.final_norm = norm(hidden, eps, dtype=dtype, **split)

    def hidden_states(
        self,
        tokens: Tensor,
        randomness: Randomness | None = None,
        token_types: Tensor | None = None,
        padding: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """The last layer's output [s, b, h], normalised, for tokens [b, s].

        It is equal on all ranks, or with sequence_parallel this rank's shard [s / comm.size, b, h].

        tokens: int64 [b, s], equal on all ranks, s at most ``max_position_embeddings``.
        token_types: int64 [b, s]; None for type 0 everywhere. padding: as in `SelfAttention`.
        cache: of `new_cache`, with the tokens before ``tokens``; it then has these, too. The caller says how many of
        them are real (`KeyValueCache.advance`). Only without sequence parallelism (else ValueError), and as in
        `SelfAttention`.
        """
        s = tokens.shape[1]
        config = self._sizes
        total = s if cache is None else max(cache.lengths) + s
        if total > config.max_position_embeddings:
            raise ValueError(
                f"a sequence of {total} tokens exceeds max_position_embeddings={config.max_position_embeddings}"
            )
        first, end = 0, s
        if self.sequence_parallel:
            require_divisible(self.comm.size, sequence_length=s)
            if cache is not None:
                raise ValueError("a key-value cache excludes sequence_parallel, because a new token has no shards")
            first, end = self.comm.rank * s // self.comm.size, (self.comm.rank + 1) * s // self.comm.size
        x: Tensor = self.embedding(tokens.t())
        turned = None
        if self._rotary:
            turned = self._rotation(slice(0, s) if cache is None else cache.begin(s))
        else:
            positions = slice(first, end) if cache is None else cache.begin(s)
            if self.canonical is not None and self.sequence_parallel:  # the gradient is then gathered, and whole
                of_positions = scatter_to_tensor_parallel_region(self.position_embedding[:s], self.comm, 0)
            else:
                of_positions = self.position_embedding[positions]  # [s, h], or [b, s, h] where the rows differ
            x = x + (of_positions.unsqueeze(1) if of_positions.dim() == 2 else of_positions.transpose(0, 1))
        if self._num_tokentypes:
            x = x + self._of_types(tokens, token_types, first, end)
        elif token_types is not None:
            raise ValueError("token_types need a model with num_tokentypes above 0")
        if self._norm_placement == "post":
            x = self.embedding_norm(x)
        if self.training and config.hidden_dropout > 0:
            x = dropout(x, config.hidden_dropout, needed(randomness, "embedding").keys("embedding"), first)
        if padding is not None:
            padding = real_tokens(padding, *tokens.shape)  # once, not in every layer
        for number, layer in enumerate(self.layers):
            x = layer(x, randomness, padding, None if cache is None else cache.layers[number], turned)
        if self._norm_placement == "pre":
            normed: Tensor = self.final_norm(x)
            return normed
        return x

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """An empty cache for ``batch`` rows of at most ``capacity`` tokens, of this rank's heads. Not collective."""
        attention = self.layers[0].attention
        assert isinstance(attention, SelfAttention)
        weight = self.embedding.weight
        return KeyValueCache(
            len(self.layers), batch, attention.kv_heads, attention.head_size, capacity, dtype=weight.dtype,
            device=weight.device,
        )  # fmt: skip

    def _rotation(self, positions: slice | Tensor) -> Rotation:
        """The rotation of queries and keys at ``positions``, the same in every layer."""
        config, weight = self._sizes, self.embedding.weight
        if isinstance(positions, slice):
            positions = torch.arange(positions.start, positions.stop, dtype=torch.int64, device=weight.device)
        turns = frequencies(config.head_size, config.rotary_base, config.rope_scaling, weight.device)
        return rotation(positions, turns, weight.dtype)

    def _of_types(self, tokens: Tensor, token_types: Tensor | None, first: int, end: int) -> Tensor:
        """The embedding of the token types at positions ``first`` to ``end``: [end - first, b, h]."""
        if token_types is None:
            token_types = torch.zeros_like(tokens)
        elif token_types.shape != tokens.shape:
            raise ValueError(f"token_types {list(token_types.shape)} must be {list(tokens.shape)}, as the tokens are")
        require_within(token_types, self._num_tokentypes, "a token type")
        if self.canonical is not None and self.sequence_parallel:  # every rank adds up the gradient in the same order
            return scatter_to_tensor_parallel_region(
                looked_up(token_types.t(), self.token_type_embedding), self.comm, 0
            )
        return looked_up(token_types.t()[first:end], self.token_type_embedding)
