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
        """The gradients of q, k and v.

        A part of this rank's own block comes first, while the next block arrives, and the rest comes last, while the
        gradients of its keys arrive from the other ranks.
        """
        masks, exchange, dtype = _Masks(self, q, keys, bias), self.exchange(), accumulated_in(q.dtype)
        dq = torch.zeros_like(q, dtype=dtype)

        def add(total: Tensor, owner: int, block: Tensor, parts: list[tuple[slice, slice]]) -> Tensor:
            """Add to ``total`` the gradients of ``owner``'s keys and values by some of the block's scores."""
            for rows, columns in parts:
                found = attend_backward(
                    grad[:, :, rows], q[:, :, rows], block[0, :, :, columns], block[1, :, :, columns],
                    out[:, :, rows], lse[:, :, rows], masks.block(owner, rows, columns),
                )  # fmt: skip
                dq[:, :, rows] += found[0]
                total[0, :, :, columns] += found[1]
                total[1, :, :, columns] += found[2]
            return total

        def zeros() -> Tensor:
            return torch.zeros((2, *k.shape), dtype=dtype, device=k.device)

        mine, total, (first, rest) = torch.stack((k, v)), zeros(), self.own_parts(k.shape[2])
        for owner, block in exchange.blocks(mine):
            if owner == self.rank:
                add(total, owner, block, first)
            else:
                exchange.add(owner, add(zeros(), owner, block, [self.seen(owner, k.shape[2])]))
        dk, dv = add(total, self.rank, mine, rest).add_(exchange.total())
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def own_parts(self, rows: int) -> tuple[list[tuple[slice, slice]], list[tuple[slice, slice]]]:
        """This rank's own block of scores, which has ``rows`` rows, in two lists of (rows, columns)."""
        early, late = slice(0, rows // 2), slice(rows // 2, rows)
        if self.causal:  # of the early and the late chunk
            return [(early, early)], [(late, early), (late, late)]
        return [(early, _ALL)] if rows > 1 else [], [(late, _ALL)]

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
        # A bias has the causal mask, too. Between different chunks nothing is left to mask.
        causal = way.causal and bias is None and owner == way.rank and rows == columns
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
