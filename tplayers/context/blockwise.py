"""Attention block by block, while the next block of keys and values is on its way: the ring, and the gathered form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tplayers.functions import one_derivative
from tplayers.rng import dropout_mask_at

from .blocks import BlockMask, accumulated_in, attend, attend_backward, merge
from .chunks import SequenceChunks
from .exchanges import BlockExchange

_ALL = slice(None)


@dataclass(frozen=True)
class Blockwise:
    """One attention layer's way through the blocks of all ranks. Collective over the context group.

    causal, dropout: of the scores. rank: of this process in the group. exchange: makes what a pass begins with.
    """

    chunks: SequenceChunks
    rank: int
    exchange: Callable[[], BlockExchange]
    causal: bool
    dropout: float

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, bias: Tensor | None) -> Tensor:
        """The result [b, heads, s / ranks, d] for q [b, heads, s / ranks, d] and k, v [b, groups, s / ranks, d].

        keys: of dropout by position, [b, heads]. bias: [b, 1, 1, s], or [b, 1, s, s] in place of ``causal``.
        """
        result: Tensor = _Blockwise.apply(q, k, v, keys, bias, self)  # type: ignore[no-untyped-call]
        return result

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The result and its lse."""
        total: tuple[Tensor, Tensor] | None = None
        masks = _Masks(self, q, keys, bias)
        for owner, (key, value) in self.exchange().blocks(torch.stack((k, v))):
            rows, columns = self.seen(owner, k.shape[2])
            found = attend(q[:, :, rows], key[:, :, columns], value[:, :, columns], masks.block(owner, rows, columns))
            if total is None:  # of this rank, and of all rows
                total = found[0].to(accumulated_in(q.dtype)), found[1].contiguous()
            else:
                merge(total[0][:, :, rows], total[1][:, :, rows], *found)
        assert total is not None
        return total[0].to(q.dtype), total[1]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keys: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The gradients of q, k and v."""
        masks, exchange, dtype = _Masks(self, q, keys, bias), self.exchange(), accumulated_in(q.dtype)
        dq = torch.zeros_like(q, dtype=dtype)
        for owner, (key, value) in exchange.blocks(torch.stack((k, v))):
            rows, columns = self.seen(owner, k.shape[2])
            found = attend_backward(
                grad[:, :, rows], q[:, :, rows], key[:, :, columns], value[:, :, columns], out[:, :, rows],
                lse[:, :, rows], masks.block(owner, rows, columns),
            )  # fmt: skip
            dq[:, :, rows] += found[0]
            of_block = torch.zeros((2, *k.shape), dtype=dtype, device=k.device)
            of_block[0, :, :, columns], of_block[1, :, :, columns] = found[1:]
            exchange.add(owner, of_block)
        dk, dv = exchange.total()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def seen(self, owner: int, rows: int) -> tuple[slice, slice]:
        """The rows of this rank, and the columns of ``owner``'s, of which the scores are not all masked.

        Of another rank's zigzag chunks both rows see the early one, or the late row sees both: half of the scores, at
        every rank and step, and none of them is masked. rows: of a rank.
        """
        if not self.causal or owner == self.rank:
            return _ALL, _ALL
        half = rows // 2
        return (_ALL, slice(0, half)) if owner < self.rank else (slice(half, rows), _ALL)


class _Masks:
    """The masks of one layer's blocks."""

    def __init__(self, way: Blockwise, q: Tensor, keys: Tensor | None, bias: Tensor | None) -> None:
        self._way, self._keys, self._bias = way, keys, bias
        self._s, self._device = q.shape[2] * way.chunks.ranks, q.device

    def _positions(self, rank: int, some: slice) -> Tensor:
        return self._way.chunks.positions(rank, self._s, self._device)[some]

    def block(self, owner: int, rows: slice, columns: slice) -> BlockMask:
        way, bias, kept = self._way, self._bias, None
        # A bias has the causal mask, too. Of other ranks nothing is left to mask.
        causal = way.causal and bias is None and owner == way.rank
        if bias is None and self._keys is None:
            return BlockMask(causal)
        at, of = self._positions(way.rank, rows), self._positions(owner, columns)
        if bias is not None:
            bias = bias[..., of] if bias.shape[-2] == 1 else bias[..., at[:, None], of]
        if self._keys is not None:
            kept = dropout_mask_at(way.dropout, self._keys, at, of, self._s)
        return BlockMask(causal, bias, way.dropout, kept)


class _Blockwise(torch.autograd.Function):
    """`Blockwise`: it saves its inputs, the result and the lse, and the backward brings the blocks again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, bias: Tensor | None, way: Blockwise
    ) -> Tensor:
        out, lse = way.forward(q, k, v, keys, bias)
        ctx.way = way
        ctx.save_for_backward(q, k, v, out, lse, keys, bias)
        return out

    @staticmethod
    @one_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.way.backward(grad, *ctx.saved_tensors), None, None, None)
