"""RelativeBias: a number for each head and each distance between two tokens, added to the scores (T5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from commengine import Communicator
from tplayers.attention.head_split import HeadSplit
from tplayers.embedding import looked_up
from tplayers.placement import Normal, Placement, add_parameter


class RelativeBias(nn.Module):
    """The table of a stack's positions: what is added to the scores of each head (Raffel et al. 2020, section 2.1).

    It is split by heads, as the attention is. All layers of the stack use it.

    num_heads, heads, comm: of the attention layers. here: False for a pipeline stage without the weight, which gets the
    table with its input. buckets: of distances (`relative_buckets`). causal: no token sees a later one.

    forward: ``queries``, the positions of the tokens that look, and the number of ``keys`` that lie at positions 0, 1,
    2 and so on -> [1, heads of this rank, queries, keys]. With ``causal`` it is a very low number where a key comes
    later. table: what is looked up, [buckets, heads of this rank]. It communicates nothing.
    """

    weight: nn.Parameter  # if it is here

    def __init__(
        self,
        num_heads: int,
        heads: HeadSplit,
        comm: Communicator,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        causal: bool,
        init: Normal,
        here: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        columns = Placement(
            (buckets, num_heads), init, dim=1, index=comm.rank, count=comm.size, padded=(buckets, heads.padded_groups)
        )
        add_parameter(self, "weight", columns if here else None, dtype)
        self.shape, self.max_distance, self.causal = columns.local_shape, max_distance, causal

    def forward(self, queries: range, keys: int, table: Tensor) -> Tensor:
        places = torch.arange(keys, dtype=torch.int64, device=table.device)
        mine = torch.arange(queries.start, queries.stop, dtype=torch.int64, device=table.device)
        distance = places - mine.unsqueeze(1)
        numbers = relative_buckets(distance, self.shape[0], self.max_distance, bidirectional=not self.causal)
        bias = looked_up(numbers, table).permute(2, 0, 1)
        if self.causal:
            bias = bias.masked_fill(distance > 0, torch.finfo(bias.dtype).min / 2)
        return bias.unsqueeze(0)


def relative_buckets(distance: Tensor, buckets: int, max_distance: int, *, bidirectional: bool) -> Tensor:
    """The number, from 0, of the bucket of each ``distance`` (a key's position minus that of the token that looks).

    bidirectional: half of the buckets are of later keys; otherwise all later keys count as distance 0. Half of the
    buckets of a side are of one distance each; the others grow with it, up to ``max_distance``, from which on all
    distances have the last bucket. The logarithm is in float32, as in the first T5: at the border of a bucket another
    precision finds another one.
    """
    first: Tensor | int = 0
    if bidirectional:
        buckets //= 2
        first, distance = (distance > 0) * buckets, distance.abs()
    else:
        distance = -distance.clamp(max=0)
    exact = buckets // 2
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    grown = exact + (share * (buckets - exact)).long()
    return first + torch.where(distance < exact, distance, grown.clamp(max=buckets - 1))
