"""TransformerConfig: the sizes and options that all models of text share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from tplayers.attention.head_split import HeadSplit, split_heads
from tplayers.attention.rotary import RopeScaling, require_pairs
from tplayers.attention.self_attention import DropoutMask
from tplayers.experts.moe import ExpertOptions
from tplayers.formulas import TransformerShape
from tplayers.mlp import Gelu
from tplayers.norm import NORMS, Normalization
from tplayers.placement import require_divisible, require_one_of
from tplayers.recompute import RECOMPUTE, Recompute

#: Where a layer normalises: "pre" inside each branch, which leaves the residual stream as it is (paper, Figure 7 b), or
#: "post" after each residual sum, as in the first BERT (Figure 7 a).
NormPlacement: TypeAlias = Literal["pre", "post"]

NORM_PLACEMENTS = get_args(NormPlacement)

#: How a model knows positions: by a table that is learned and added to the embedding, by rotating queries and keys, or
#: by a table of distances that is added to the scores (`T5` alone).
PositionEmbedding: TypeAlias = Literal["learned_absolute", "rope", "relative"]

POSITION_EMBEDDINGS = get_args(PositionEmbedding)

_OF_DECODERS: tuple[NormPlacement, Gelu] = "pre", "tanh"


@dataclass(frozen=True)
class TransformerConfig:
    """The sizes and options that `GPTConfig` and `BERTConfig` share; the defaults are the paper's GPT.

    ffn_hidden_size: None for 4 * hidden_size, or with ``swiglu`` for Megatron-LM's 2 / 3 of it in multiples of 64.
    make_vocab_size_divisible_by: the vocabulary is padded to a multiple of this at every TP size, so that the model is
    the same at every TP size.
    sequence_parallel: as in `TransformerBlock`. It changes how the model is computed, not its function, as does
    recompute: "full" keeps only the input of each layer for the backward, and runs the layer again, communication
        included. "selective" recomputes the inside of attention (`SelfAttention`).
    attention_dropout_mask: as in `SelfAttention`.

    The Llama family is a `GPT` with other values of these:

    normalization, norm_epsilon: of all norms, "LayerNorm" or "RMSNorm". swiglu: the MLP is SwiGLU instead of GELU.
    position_embedding_type: "learned_absolute" or "rope". rotary_base, rope_scaling: of "rope" (`RopeScaling`).
    num_query_groups: heads of keys and values, each of which num_attention_heads / num_query_groups query heads share
        (Ainslie et al. 2023); None for as many as query heads.
    kv_channels: the size of a head; None for hidden_size / num_attention_heads.
    add_bias_linear: biases in all linear layers. add_qkv_bias: in those of queries, keys and values at least.
    qk_layernorm: queries and keys are normalised head by head, before they are rotated.
    untie_embeddings_and_output_weights: the output layer has a weight of its own.
    pad_attention_heads: heads that the tensor group does not divide are padded with heads of zeros.

    num_experts: the experts of each layer, in place of its feed-forward block (`tplayers.MoE`); None for none. The
        fields that begin with "moe" are then those of `tplayers.ExpertOptions`, and moe_ffn_hidden_size is None for
        ``ffn_hidden_size``. moe_aux_loss_coeff, moe_z_loss_coeff: of `tplayers.RouterLosses`.
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
    norm_epsilon: float = 1e-5
    make_vocab_size_divisible_by: int = 1024
    sequence_parallel: bool = False
    recompute: Recompute = None
    attention_dropout_mask: DropoutMask = "position"
    normalization: Normalization = "LayerNorm"
    swiglu: bool = False
    position_embedding_type: PositionEmbedding = "learned_absolute"
    rotary_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = False
    pad_attention_heads: bool = False
    num_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_router_pre_softmax: bool = False
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float = 0.0

    # What `BERTConfig` has otherwise; no fields, because a decoder has no choice.
    causal, num_tokentypes = True, 0
    norm_placement, gelu = _OF_DECODERS

    # What only `T5Config` has otherwise: the form of GELU of a gate (None for SiLU), and the factor of the scores.
    gate_gelu: ClassVar[Gelu | None] = None
    attention_scale: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        require_one_of(NORMS, normalization=self.normalization)
        require_one_of(POSITION_EMBEDDINGS, position_embedding_type=self.position_embedding_type)
        require_one_of(NORM_PLACEMENTS, norm_placement=self.norm_placement)
        require_one_of(RECOMPUTE, recompute=self.recompute)
        if self.num_experts is not None and self.add_bias_linear:
            raise ValueError("num_experts needs add_bias_linear=False, because experts have no biases")
        self.experts  # noqa: B018  it raises where the options do not fit each other

    @property
    def total_layers(self) -> int:
        """The layers of all stacks."""
        return self.num_layers

    @property
    def ffn_size(self) -> int:
        """The width of the feed-forward block."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return max(int(4 * self.hidden_size * 2 / 3) // 64, 1) * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """The width of an expert."""
        return self.ffn_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size

    @property
    def experts(self) -> ExpertOptions | None:
        """The experts of a layer; None for a feed-forward block."""
        if self.num_experts is None:
            return None
        return ExpertOptions(
            self.num_experts, self.moe_router_topk, self.expert_ffn_size, self.swiglu, self.gelu,
            self.moe_router_pre_softmax, self.moe_shared_expert_intermediate_size, self.moe_shared_expert_gate,
        )  # fmt: skip

    @property
    def head_size(self) -> int:
        """The size of an attention head."""
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def query_groups(self) -> int:
        """The heads of keys and values."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a head of keys and values."""
        return self.query_groups != self.num_attention_heads

    @property
    def qkv_bias(self) -> bool:
        """Whether the layers of queries, keys and values have biases."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def padded_vocab_size(self) -> int:
        """``vocab_size`` rounded up to a multiple of ``make_vocab_size_divisible_by`` (128 * 8 in the paper)."""
        return -(-self.vocab_size // self.make_vocab_size_divisible_by) * self.make_vocab_size_divisible_by

    def cost_shape(self, seq: int, tensor: int = 1) -> TransformerShape:
        """The shape for `tplayers.formulas`, of sequences of ``seq`` tokens.

        tensor: the ranks of the tensor group, for which heads of zeros are added with ``pad_attention_heads``.
        """
        heads, groups = self.num_attention_heads, self.query_groups
        split = self.head_split(tensor) if self.pad_attention_heads else None
        if split is not None:
            heads, groups = split.padded_groups * split.padded_queries, split.padded_groups
        size = self.kv_channels if heads == self.num_attention_heads else self.head_size
        return TransformerShape(
            self.num_layers, self.hidden_size, heads, seq, self.padded_vocab_size, "gpt" if self.causal else "bert",
            kv_heads=groups, head=size, gated=self.swiglu,
            rms_norm=self.normalization == "RMSNorm", rotary=self.position_embedding_type == "rope",
            biases=self.add_bias_linear, qkv_biases=self.qkv_bias, untied=self.untie_embeddings_and_output_weights,
            qk_norms=self.qk_layernorm, **self._cost_of_experts(),
        )  # fmt: skip

    def _cost_of_experts(self) -> dict[str, Any]:
        if self.num_experts is None:
            return {"ffn": self.ffn_size}
        shared = self.moe_shared_expert_intermediate_size or 0
        return {
            "ffn": self.expert_ffn_size, "experts": self.num_experts, "of_token": self.moe_router_topk,
            "shared": shared, "shared_gate": self.moe_shared_expert_gate,
        }  # fmt: skip

    def head_split(self, tensor: int) -> HeadSplit:
        """How ``tensor`` ranks share the attention heads. Raises ValueError where they cannot."""
        heads, groups = self.num_attention_heads, self.query_groups
        return split_heads(tensor, heads, groups, self.head_size, pad=self.pad_attention_heads)

    @property
    def ffn_widths(self) -> dict[str, int]:
        """The widths of the feed-forward blocks, or of the experts, that a layer has, by the names of the fields."""
        if self.num_experts is None:
            return {"ffn_hidden_size": self.ffn_size}
        own, shared = self.moe_ffn_hidden_size, self.moe_shared_expert_intermediate_size
        found = {"ffn_hidden_size": self.ffn_size} if own is None else {"moe_ffn_hidden_size": own}
        return found if shared is None else {**found, "moe_shared_expert_intermediate_size": shared}

    def require_parallel(self, tensor: int, *, ranks: int | None = None) -> None:
        """Raise ValueError, with the sizes that would work, unless the model splits over ``tensor`` ranks.

        ranks: the ranks of the whole job, if known; ``tensor`` must divide this number, too.
        """
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}"
            )
        pad, heads = self.pad_attention_heads, {"num_attention_heads": self.num_attention_heads}
        if self.kv_channels is None:
            heads["hidden_size"] = self.hidden_size  # that of all heads together
        require_divisible(
            tensor, **({} if pad else heads), **self.ffn_widths,
            padded_vocab_size=self.padded_vocab_size, **({} if ranks is None else {"ranks": ranks}),
        )  # fmt: skip
        self.head_split(tensor)
        if self.position_embedding_type == "rope":
            heads_of = f"num_attention_heads={self.num_attention_heads} = {self.head_size}"
            sizes = f"hidden_size={self.hidden_size} / {heads_of}"
            require_pairs(self.head_size, sizes if self.kv_channels is None else "")
