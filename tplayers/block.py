"""TransformerBlock: one transformer layer, normalising before or after each branch (paper, Figures 2, 4 and 7)."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from commengine import Communicator, Stream

from .attention.key_value_cache import LayerCache
from .attention.rotary import Rotation
from .attention.self_attention import DropoutMask, SelfAttention, needed
from .linear import DEFAULT_INIT
from .mlp import MLP, Gelu, SwiGLU
from .norm import NORMS, Normalization, require_normalization
from .placement import Normal
from .recompute import Recompute, recomputed, require_known
from .rng import Randomness, dropout

#: Where a layer normalises: "pre" inside each branch, which leaves the residual stream as it is (paper, Figure 7 b), or
#: "post" after each residual sum, as in the first BERT (Figure 7 a).
NormPlacement: TypeAlias = Literal["pre", "post"]

NORM_PLACEMENTS = ("pre", "post")


class TransformerBlock(nn.Module):
    """Pre-LN: x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).

    Post-LN: norm(x + dropout(attention(x))), then norm(x + dropout(mlp(x))). See `NormPlacement`.

    Two all-reduces of b * s * h elements forward and two backward, as in the paper's Figure 4. Every rank computes the
    same norms, dropout and residuals.

    With sequence_parallel (Korthikanti et al. 2022, section 4.2.2) a rank computes norms, dropout and residuals of its
    sequence shard only, and each all-reduce becomes a reduce-scatter and an all-gather of the same volume. Two more
    all-gathers run backward, because the column-parallel layers keep only a shard of their input.

    forward: x [s, b, h], equal on all ranks -> the same. With sequence_parallel: x [s / comm.size, b, h], this rank's
    sequence shard -> the same. padding, cache, rotation: as in `SelfAttention`.
    head_size, query_groups, pad_heads, qkv_bias: as in `SelfAttention`. bias: of the projection and of the MLP.
    gelu: as in `MLP`. swiglu: the MLP is `SwiGLU` instead. normalization, eps: of both norms.
    norm_placement: "pre" or "post" (else ValueError).
    site: the name of this layer in its dropout masks, such as "layers.3".
    dropout_mask: of attention dropout (`SelfAttention`).
    recompute: "full" keeps only x for the backward, and runs the forward again, communication included.
        "selective" recomputes the inside of attention (`SelfAttention`).
    overlap_stream: a stream of ``comm`` on which the backward of column-parallel layers communicates.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        ffn_hidden_size: int,
        comm: Communicator,
        *,
        causal: bool = True,
        head_size: int | None = None,
        query_groups: int | None = None,
        pad_heads: bool = False,
        bias: bool = True,
        qkv_bias: bool = True,
        gelu: Gelu = "tanh",
        swiglu: bool = False,
        normalization: Normalization = "LayerNorm",
        norm_placement: NormPlacement = "pre",
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        dropout_mask: DropoutMask = "position",
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        recompute: Recompute = None,
        overlap_stream: Stream | None = None,
        init: Normal = DEFAULT_INIT,
        output_init: Normal = DEFAULT_INIT,
        site: str = "layer",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_known(recompute)
        if norm_placement not in NORM_PLACEMENTS:
            raise ValueError(f"norm_placement={norm_placement!r} must be one of {', '.join(NORM_PLACEMENTS)}")
        self.comm = comm
        self.sequence_parallel = sequence_parallel
        self.recompute = recompute
        self.norm_placement = norm_placement
        self.hidden_dropout = hidden_dropout
        self.site = site
        require_normalization(normalization)
        norm = NORMS[normalization]
        self.attention_norm = norm(hidden_size, eps, sequence_parallel=sequence_parallel, dtype=dtype)
        self.attention = SelfAttention(
            hidden_size, num_heads, comm, causal=causal, head_size=head_size, query_groups=query_groups,
            pad_heads=pad_heads, bias=bias,
            qkv_bias=qkv_bias, attention_dropout=attention_dropout, dropout_mask=dropout_mask,
            sequence_parallel=sequence_parallel, recompute_core=recompute == "selective",
            overlap_stream=overlap_stream, init=init, output_init=output_init, site=f"{site}.attention", dtype=dtype,
        )  # fmt: skip
        self.mlp_norm = norm(hidden_size, eps, sequence_parallel=sequence_parallel, dtype=dtype)
        of_mlp: dict[str, Any] = {
            "bias": bias, "sequence_parallel": sequence_parallel, "overlap_stream": overlap_stream, "init": init,
            "output_init": output_init, "dtype": dtype,
        }  # fmt: skip
        self.mlp: MLP | SwiGLU
        if swiglu:
            self.mlp = SwiGLU(hidden_size, ffn_hidden_size, comm, **of_mlp)
        else:
            self.mlp = MLP(hidden_size, ffn_hidden_size, comm, gelu=gelu, **of_mlp)

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
        first_row = self.comm.rank * x.shape[0] if self.sequence_parallel else 0
        return dropout(x, self.hidden_dropout, needed(randomness, site).keys(site), first_row)
