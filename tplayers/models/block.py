"""TransformerBlock: one transformer layer, normalising before or after each branch (paper, Figures 2, 4 and 7)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from commengine import Communicator, Stream
from tplayers.attention.key_value_cache import LayerCache
from tplayers.attention.rotary import Rotation
from tplayers.attention.self_attention import SelfAttention, needed
from tplayers.context.group import ContextGroup
from tplayers.experts.losses import RouterLosses
from tplayers.experts.moe import MoE
from tplayers.mlp import MLP, SwiGLU
from tplayers.norm import NORMS
from tplayers.placement import Normal
from tplayers.recompute import recomputed
from tplayers.rng import Randomness, dropout

from .config import TransformerConfig


class TransformerBlock(nn.Module):
    """Pre-LN: x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).

    Post-LN: norm(x + dropout(attention(x))), then norm(x + dropout(mlp(x))). See `NormPlacement`.

    Two all-reduces of b * s * h elements forward and two backward, as in the paper's Figure 4. Every rank computes the
    same norms, dropout and residuals.

    With sequence_parallel (Korthikanti et al. 2022, section 4.2.2) a rank computes norms, dropout and residuals of its
    sequence shard only, and each all-reduce becomes a reduce-scatter and an all-gather of the same volume. Two more
    all-gathers run backward, because the column-parallel layers keep only a shard of their input.

    forward: x [s, b, h], equal on all ranks -> the same. With sequence_parallel: x [s / comm.size, b, h], this rank's
    sequence shard -> the same. padding, cache, rotation: as in `SelfAttention`. With a context group s counts this
    rank's positions.

    config: of the model; a block has the sizes and options of one of its layers (`TransformerConfig`).
    site: the name of this layer in its dropout masks, such as "layers.3".
    overlap_stream: a stream of ``comm`` on which the backward of column-parallel layers communicates.
    context: the ranks that share each sequence (`ContextGroup`), or None. expert_group, router_losses: as in `MoE`, if
    ``config`` has experts.
    """

    def __init__(
        self,
        config: TransformerConfig,
        comm: Communicator,
        *,
        site: str = "layer",
        overlap_stream: Stream | None = None,
        context: ContextGroup | None = None,
        expert_group: Communicator | None = None,
        router_losses: RouterLosses | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.comm, self.site, self.context = comm, site, context
        self.sequence_parallel, self.recompute = config.sequence_parallel, config.recompute
        self.norm_placement, self.hidden_dropout = config.norm_placement, config.hidden_dropout
        hidden, norm = config.hidden_size, NORMS[config.normalization]
        # The branches add up along the residual stream, so each starts smaller (Radford et al. 2019, section 2.3).
        output_init = self.output_init = Normal(config.init_method_std / math.sqrt(2 * config.num_layers))
        split: dict[str, Any] = {"sequence_parallel": config.sequence_parallel, "dtype": dtype}
        linear = {**split, "overlap_stream": overlap_stream, "init": Normal(config.init_method_std)}
        self.attention_norm = norm(hidden, config.norm_epsilon, **split)
        self.attention = SelfAttention(
            hidden, config.num_attention_heads, comm, causal=config.causal, head_size=config.kv_channels,
            query_groups=config.query_groups, pad_heads=config.pad_attention_heads, bias=config.add_bias_linear,
            qkv_bias=config.qkv_bias, qk_norm=config.normalization if config.qk_layernorm else None,
            norm_epsilon=config.norm_epsilon, attention_dropout=config.attention_dropout,
            scale=config.attention_scale, dropout_mask=config.attention_dropout_mask,
            recompute_core=config.recompute == "selective", output_init=output_init, site=f"{site}.attention",
            context=context, **linear,
        )  # fmt: skip
        self.mlp_norm = norm(hidden, config.norm_epsilon, **split)
        of_mlp = (hidden, config.ffn_size, comm)
        self.mlp: MLP | SwiGLU | MoE
        if config.experts is not None:
            self.mlp = MoE(
                hidden, config.experts, comm, expert_group=expert_group, losses=router_losses,
                shared=[] if context is None else [context.comm], output_init=output_init, **linear,
            )  # fmt: skip
        elif config.swiglu:
            self.mlp = SwiGLU(
                *of_mlp, gelu=config.gate_gelu, bias=config.add_bias_linear, output_init=output_init, **linear
            )
        else:
            self.mlp = MLP(*of_mlp, gelu=config.gelu, bias=config.add_bias_linear, output_init=output_init, **linear)

    def forward(
        self,
        x: Tensor,
        randomness: Randomness | None = None,
        padding: Tensor | None = None,
        cache: LayerCache | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        if self.recompute == "full" and torch.is_grad_enabled() and cache is None:
            return recomputed(self._layer, x, randomness, padding, None, rotation)
        return self._layer(x, randomness, padding, cache, rotation)

    def _layer(
        self,
        x: Tensor,
        randomness: Randomness | None,
        padding: Tensor | None,
        cache: LayerCache | None,
        rotation: Rotation | None,
    ) -> Tensor:
        if self.norm_placement == "post":
            attended = self.attention(x, randomness, padding, cache, rotation)
            x = self.attention_norm(x + self._dropped(attended, "after_attention", randomness))
            normed: Tensor = self.mlp_norm(x + self._dropped(self.mlp(x), "after_mlp", randomness))
            return normed
        attended = self.attention(self.attention_norm(x), randomness, padding, cache, rotation)
        x = x + self._dropped(attended, "after_attention", randomness)
        return x + self._dropped(self.mlp(self.mlp_norm(x)), "after_mlp", randomness)

    def _dropped(self, x: Tensor, branch: str, randomness: Randomness | None) -> Tensor:
        if not self.training or self.hidden_dropout == 0:
            return x
        site = f"{self.site}.{branch}"
        keys = needed(randomness, site).keys(site)
        return dropout(x, self.hidden_dropout, keys, first_row(x, self.comm, self.sequence_parallel, self.context))


def first_row(x: Tensor, comm: Communicator, sequence_parallel: bool, context: ContextGroup | None) -> int | Tensor:
    """The position of x [s, b, h]'s row 0 in the sequence, or with a context group those of all its rows."""
    shard, shards = (comm.rank, comm.size) if sequence_parallel else (0, 1)
    return shard * x.shape[0] if context is None else context.rows(x.shape[0], shard, shards, x)
