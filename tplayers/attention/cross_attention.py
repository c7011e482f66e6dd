"""CrossAttention: the tokens of a decoder look at those of an encoder, split by heads as self-attention is."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tplayers.linear import columns_together
from tplayers.rng import Randomness

from .self_attention import SelfAttention


class CrossAttention(SelfAttention):
    """Multi-head attention of x to the output of an encoder. Each rank computes its own heads.

    The queries have a weight of their own, and keys and values share one, whose input is the encoder's output. So there
    is one all-reduce forward, and two backward: of the gradients of x and of the encoder's output.

    The arguments are those of `SelfAttention`, without ``causal``, ``context`` and the norms of heads.

    forward: x [s, b, h], equal on all ranks, and ``source``, the encoder's output [n, b, h] -> as x. With
    sequence_parallel both are this rank's sequence shards. source: or what `keys_values` has made of it, which does not
    change while new tokens are generated. bias: added to the scores, [1 or b, 1 or this rank's heads, s, n].
    """

    separate = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, causal=False, **options)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        source: Tensor | tuple[Tensor, Tensor],
        randomness: Randomness | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        k, v = self.keys_values(source) if isinstance(source, Tensor) else source
        (q,) = columns_together(x, [self.query])
        q = q.view(*q.shape[:2], self.num_heads, self.head_size).permute(1, 2, 0, 3)
        return self._joined(self._kept(q, k, v, self._drawn(randomness), bias))

    def keys_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [b, heads of this rank, n, d] of ``source``. Every rank calls it."""
        (both,) = columns_together(source, [self.key_value])
        k, v = both.view(*both.shape[:2], 2, self.kv_heads, self.head_size).permute(2, 1, 3, 0, 4).unbind()
        return k, v
