"""T5: a tensor-parallel encoder, and a decoder that looks at its output (Raffel et al. 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from commengine import Communicator
from commengine.operations.checks import INT_MAX
from tplayers.attention.cross_attention import CrossAttention
from tplayers.attention.key_value_cache import LayerCache
from tplayers.attention.self_attention import padding_bias, real_tokens
from tplayers.formulas import TransformerShape
from tplayers.mlp import Gelu
from tplayers.norm import NORMS, LayerNorm, Normalization, RMSNorm
from tplayers.placement import Normal, require_divisible
from tplayers.recompute import recomputed
from tplayers.rng import Randomness

from .block import TransformerBlock
from .config import PositionEmbedding, TransformerConfig
from .part import StageInput
from .relative_bias import RelativeBias
from .transformer import Transformer

#: the fields of `TransformerConfig` in which a T5 has no choice
_FIXED = (
    "position_embedding_type", "max_position_embeddings", "rope_scaling", "num_query_groups", "add_bias_linear",
    "add_qkv_bias", "qk_layernorm", "num_experts",
)  # fmt: skip


@dataclass(frozen=True)
class T5Config(TransformerConfig):
    """The shape of a T5; the defaults are those of the first one. `TransformerConfig` has the other fields.

    num_layers: of the encoder, and of the decoder. max_position_embeddings: the largest number, because positions are
        relative. decoder_start_token_id: the first token of the decoder, after which it begins.
    swiglu: the feed-forward block is a gated GELU (GEGLU), as in T5 1.1, and not ReLU.
    untie_embeddings_and_output_weights: as in T5 1.1.
    scale_decoder_outputs: the decoder's output is multiplied by hidden_size^-0.5 before the output layer. The first T5
        does it; T5 1.1 does not.
    relative_attention_num_buckets, relative_attention_max_distance: of the table of each stack (`RelativeBias`).

    Attention has the scale 1. Raises ValueError where a field has a value that no T5 has, such as biases.
    """

    max_position_embeddings: int = INT_MAX
    normalization: Normalization = "RMSNorm"
    norm_epsilon: float = 1e-6
    make_vocab_size_divisible_by: int = 128
    add_bias_linear: bool = False
    position_embedding_type: PositionEmbedding = "relative"
    scale_decoder_outputs: bool = True
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    decoder_start_token_id: int = 0

    gelu: ClassVar[Gelu | None] = None  # type: ignore[assignment, misc]
    gate_gelu: ClassVar[Gelu | None] = "tanh"
    attention_scale: ClassVar[float | None] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _FIXED:
            value, only = getattr(self, name), getattr(T5Config, name)
            if value != only:
                raise ValueError(f"{name}={value!r}: a T5 has {only!r}; only a GPT may differ")
        buckets, most = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if buckets < 4 or buckets % 2:
            raise ValueError(f"relative_attention_num_buckets={buckets} must be even, and at least 4")
        if most <= buckets // 2:
            raise ValueError(f"relative_attention_max_distance={most} must be above half of the {buckets} buckets")

    @property
    def total_layers(self) -> int:
        return 2 * self.num_layers

    def cost_shape(self, seq: int, tensor: int = 1) -> TransformerShape:
        return replace(super().cost_shape(seq, tensor), model="t5", buckets=self.relative_attention_num_buckets)


class T5Block(TransformerBlock):
    """A pre-norm layer of a T5. In the decoder, attention to the encoder's output follows self-attention.

    decoder: which stack it belongs to. ends_encoder: the encoder's final norm follows.

    forward: x [s, b, h], and in the decoder the encoder's ``source`` [n, b, h], both equal on all ranks, or with
    sequence_parallel this rank's shards -> as x. bias, source_bias: added to the scores of both attentions (their
    ``bias``). cache: as in `SelfAttention`. source: or as in `CrossAttention`.
    """

    def __init__(
        self, config: T5Config, comm: Communicator, *, decoder: bool, ends_encoder: bool, **options: Any
    ) -> None:
        super().__init__(config, comm, **options)
        self.attention.causal = self.decoder = decoder
        split: dict[str, Any] = {"sequence_parallel": config.sequence_parallel, "dtype": options.get("dtype")}
        norm, hidden, eps = NORMS[config.normalization], config.hidden_size, config.norm_epsilon
        self.final_norm: LayerNorm | RMSNorm | None = norm(hidden, eps, **split) if ends_encoder else None
        if decoder:
            self.cross_norm = norm(hidden, eps, **split)
            self.cross_attention = CrossAttention(
                hidden, config.num_attention_heads, comm, head_size=config.kv_channels,
                pad_heads=config.pad_attention_heads, bias=False, qkv_bias=False, scale=config.attention_scale,
                attention_dropout=config.attention_dropout, dropout_mask=config.attention_dropout_mask,
                recompute_core=config.recompute == "selective", site=f"{self.site}.cross_attention",
                init=Normal(config.init_method_std), output_init=self.output_init,
                overlap_stream=options.get("overlap_stream"), **split,
            )  # fmt: skip

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        bias: Tensor,
        source: Tensor | tuple[Tensor, Tensor] | None = None,
        source_bias: Tensor | None = None,
        randomness: Randomness | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        if self.recompute == "full" and torch.is_grad_enabled() and cache is None:
            return recomputed(self._computed, x, bias, source, source_bias, randomness, None)
        return self._computed(x, bias, source, source_bias, randomness, cache)

    def _computed(
        self, x: Tensor, bias: Tensor, source: Tensor | tuple[Tensor, Tensor] | None, source_bias: Tensor | None,
        randomness: Randomness | None, cache: LayerCache | None,
    ) -> Tensor:  # fmt: skip
        attended = self.attention(self.attention_norm(x), randomness, None, cache, None, bias)
        x = x + self._dropped(attended, "after_attention", randomness)
        if self.decoder:
            attended = self.cross_attention(self.cross_norm(x), source, randomness, source_bias)
            x = x + self._dropped(attended, "after_cross_attention", randomness)
        x = x + self._dropped(self.mlp(self.mlp_norm(x)), "after_mlp", randomness)
        return x if self.final_norm is None else self.final_norm(x)


class Stacks(NamedTuple):
    """What goes from layer to layer of a T5.

    encoder [s, b, h], decoder [n, b, h]: the output of each stack so far, or with sequence_parallel this rank's shards.
    Before the first layer of a stack: the embedded tokens. tables: of both stacks, [buckets, heads of this rank].
    """

    encoder: Tensor
    decoder: Tensor
    tables: tuple[Tensor, Tensor]

    def packed(self) -> Tensor:
        """All of it as one tensor [rows, b, h], in which pipeline stages send it to each other.

        The decoder needs the encoder's output, and each stage needs the tables. So their gradients come back by the
        same way, and no stage has a copy of a table.
        """
        _, b, h = self.encoder.shape
        flat = torch.cat([table.reshape(-1) for table in self.tables])
        filled = torch.cat([flat, flat.new_zeros(-len(flat) % (b * h))])
        return torch.cat([self.encoder, self.decoder, filled.view(-1, b, h)])

    @classmethod
    def unpacked(cls, received: Tensor, rows: tuple[int, int], table: tuple[int, ...]) -> Stacks:
        """What `packed` has made. rows: of both stacks. table: the shape of a table."""
        encoder, decoder, rest = torch.split(received, [*rows, received.shape[0] - sum(rows)])
        first, second = rest.reshape(-1)[: 2 * math.prod(table)].view(2, *table).unbind()
        return cls(encoder, decoder, (first, second))


class T5(Transformer):
    """An encoder and a decoder over ``comm``, the tensor group. Call `tplayers.initialize(model, seed)`, or load one.

    forward without labels -> this rank's logits [b, n, padded vocabulary / comm.size] of ``decoder_tokens``;
    forward with labels -> per-token losses [b, n] in nats, float32 (float64 of a float64 model), equal on all ranks, 0
    where a label is -100.

    tokens: int64 [b, s], equal on all ranks of ``comm`` as all arguments are: what the encoder reads.
    decoder_tokens, labels: int64 [b, n]. A decoder's token sees those up to itself, and the encoder's.
    padding, decoder_padding: which of the tokens are real, as in `SelfAttention`; no token looks at the others. None:
        all are.
    randomness: needed in a training pass with dropout. Every rank must run forward and backward.
    part: the layers that this rank has, of ``2 * num_layers``: the encoder's come first. The embedding and the tables
        of relative positions belong to layer 0. at: where in them a pass begins. A chunk without the output layer
        returns what the next one needs (`Stacks.packed`).
    context, expert_group: None, or of one rank (else ValueError).
    config, overlap_stream, dtype: as in `Transformer`, with its errors.

    With sequence_parallel, ``comm.size`` must divide s and n (else ValueError), and after a backward the gradients of
    some parameters are partial: call `sum_partial_gradients(model, comm)`. Raises ValueError for a shape that does not
    fit and, on the host if not compiled, for a number outside its range.
    """

    config: T5Config

    def __init__(self, config: T5Config, comm: Communicator, **options: Any) -> None:
        super().__init__(config, comm, **options)
        if self.context is not None:
            raise ValueError("context: a T5 has no context parallelism; its ranks have whole sequences")
        heads = config.head_split(comm.size)
        tables = (
            RelativeBias(
                config.num_attention_heads, heads, comm, buckets=config.relative_attention_num_buckets,
                max_distance=config.relative_attention_max_distance, causal=causal,
                init=Normal(config.init_method_std), dtype=options.get("dtype"), here=self.part.first,
            )
            for causal in (False, True)
        )  # fmt: skip
        self.encoder_bias, self.decoder_bias = tables

    def new_layer(self, number: int, **options: Any) -> T5Block:
        layers = self.config.num_layers
        del options["context"], options["expert_group"], options["router_losses"]
        return T5Block(
            self.config, self.comm, site=f"layers.{number}", decoder=number >= layers,
            ends_encoder=number == layers - 1, **options,
        )  # fmt: skip

    def forward(
        self,
        tokens: Tensor,
        decoder_tokens: Tensor,
        labels: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        decoder_padding: Tensor | None = None,
        randomness: Randomness | None = None,
        at: StageInput | None = None,
    ) -> Tensor:
        at = at or StageInput()
        if decoder_tokens.shape[0] != tokens.shape[0]:
            raise ValueError(f"decoder_tokens {list(decoder_tokens.shape)} must have {tokens.shape[0]} samples")
        if labels is not None and labels.shape != decoder_tokens.shape:
            raise ValueError(f"labels {list(labels.shape)} must be {list(decoder_tokens.shape)}")
        stacks = self.begun(tokens, decoder_tokens, randomness, at)
        padding = None if padding is None else real_tokens(padding, *tokens.shape)
        bias_e, bias_d, bias_c = self._biases(stacks, tokens, decoder_tokens, padding, decoder_padding)
        encoder, decoder = stacks.encoder, stacks.decoder
        for number in self.part.chunks[at.chunk]:
            if number < self.config.num_layers:
                encoder = self.layers[number](encoder, bias_e, randomness=randomness)
            else:
                decoder = self.layers[number](decoder, bias_d, encoder, bias_c, randomness)
        if not self.part.ends(at):
            return Stacks(encoder, decoder, stacks.tables).packed()
        decoder = self.normed(decoder)
        if labels is None:
            return self.logits(decoder).transpose(0, 1)
        return self._losses(self._scores(decoder), labels.t()).t()

    def embedded(self, tokens: Tensor, site: str, randomness: Randomness | None = None) -> Tensor:
        """The input of a stack. site: of its dropout."""
        return self._embedded(tokens, None, randomness, None, site)

    def begun(self, tokens: Tensor, decoder_tokens: Tensor, randomness: Randomness | None, at: StageInput) -> Stacks:
        """What the first layer of a chunk gets: the embedded tokens, or what came from the chunk before."""
        sizes = tokens.shape[1], decoder_tokens.shape[1]
        if self.sequence_parallel:
            require_divisible(self.comm.size, sequence_length=sizes[0], decoder_sequence_length=sizes[1])
        if self.part.begins(at):
            encoder = self.embedded(tokens, "embedding", randomness)
            decoder = self.embedded(decoder_tokens, "decoder_embedding", randomness)
            return Stacks(encoder, decoder, (self.encoder_bias.weight, self.decoder_bias.weight))
        assert at.received is not None
        ranks = self.comm.size if self.sequence_parallel else 1
        return Stacks.unpacked(at.received, (sizes[0] // ranks, sizes[1] // ranks), self.encoder_bias.shape)

    def _biases(
        self, stacks: Stacks, tokens: Tensor, decoder_tokens: Tensor, padding: Tensor | None,
        decoder_padding: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """What is added to the scores of the encoder, of the decoder, and of the decoder's look at the encoder."""
        (b, s), n, dtype = tokens.shape, decoder_tokens.shape[1], stacks.encoder.dtype
        encoder = self.encoder_bias(range(s), s, stacks.tables[0])
        decoder = self.decoder_bias(range(n), n, stacks.tables[1])
        across = None
        if padding is not None:
            across = padding_bias(padding, b, s, dtype, causal=False)
            encoder = encoder + across
        if decoder_padding is not None:
            decoder = decoder + padding_bias(decoder_padding, b, n, dtype, causal=True)
        return encoder, decoder, across

    def normed(self, decoder: Tensor) -> Tensor:
        """The input of the output layer. decoder: the output of the last layer."""
        found: Tensor = self.final_norm(decoder)
        return found * self.config.hidden_size**-0.5 if self.config.scale_decoder_outputs else found

    def activations(self, tokens: Tensor, decoder_tokens: Tensor) -> Tensor:  # type: ignore[override]
        """Memory for what goes between two layers for these tokens (`Stacks.packed`)."""
        ranks, b, h = self.comm.size if self.sequence_parallel else 1, tokens.shape[0], self.config.hidden_size
        rows = (tokens.shape[1] + decoder_tokens.shape[1]) // ranks
        return self._weight.new_empty(rows + -(-2 * math.prod(self.encoder_bias.shape) // (b * h)), b, h)
