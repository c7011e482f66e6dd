"""One transformer layer, normalising before each branch (paper, Figures 2 and 4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from commengine import Communicator

from .attention import SelfAttention, needed
from .linear import DEFAULT_INIT
from .mlp import MLP
from .norm import LayerNorm
from .placement import Normal
from .rng import Randomness, dropout


class TransformerBlock(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).

    Two all-reduces of b * s * h elements forward and two backward, as in the paper's Figure 4; norms, dropout and
    residuals are computed by every rank alike.

    forward: x [s, b, h], equal on all ranks -> the same.
    site: names this layer's dropout masks, such as "layers.3".
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        ffn_hidden_size: int,
        comm: Communicator,
        *,
        causal: bool = True,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        eps: float = 1e-5,
        init: Normal = DEFAULT_INIT,
        output_init: Normal = DEFAULT_INIT,
        site: str = "layer",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_dropout = hidden_dropout
        self.site = site
        self.attention_norm = LayerNorm(hidden_size, eps, dtype=dtype)
        self.attention = SelfAttention(
            hidden_size, num_heads, comm, causal=causal, attention_dropout=attention_dropout,
            init=init, output_init=output_init, site=f"{site}.attention", dtype=dtype,
        )  # fmt: skip
        self.mlp_norm = LayerNorm(hidden_size, eps, dtype=dtype)
        self.mlp = MLP(hidden_size, ffn_hidden_size, comm, init=init, output_init=output_init, dtype=dtype)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        x = x + self._dropped(self.attention(self.attention_norm(x), randomness), "after_attention", randomness)
        return x + self._dropped(self.mlp(self.mlp_norm(x)), "after_mlp", randomness)

    def _dropped(self, x: Tensor, branch: str, randomness: Randomness | None) -> Tensor:
        if not self.training or self.hidden_dropout == 0:
            return x
        site = f"{self.site}.{branch}"
        return dropout(x, self.hidden_dropout, needed(randomness, site).keys(site))
