"""Attention of some queries to some of the keys, so that the results of several blocks of keys can be merged.

With the logarithm of the sum of the exponentials of a query's scores (``lse``), results over disjoint sets of keys
merge into the result over their union: Liu et al. 2023 (arXiv 2310.01889, section 3), after Rabe and Staats 2021. The
gradients of a block follow from the lse and the result of all keys (Dao 2023, arXiv 2307.08691, Algorithm 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels import BlockKernel, kernel_of


def accumulated_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over blocks: float32 at least. Partial results of lower precision would add their errors up."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class BlockMask:
    """What holds for one block of scores [b, heads, rows, columns].

    causal: row i sees the columns 0 to i. bias: what is added to the scores, [b, 1, 1 or rows, columns], or None.
    dropout: the probability. kept: bool, the elements that dropout keeps; None for no dropout.
    """

    causal: bool = False
    bias: Tensor | None = None
    dropout: float = 0.0
    kept: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """The result [b, heads, rows, d] of one block, and its lse [b, heads, rows].

    q: [b, heads, rows, d]. k, v: [b, groups, columns, d]; query head i uses number i // (heads / groups). The result
    and the lse may have a higher precision than q.
    """
    k, v = _repeated(k, q), _repeated(v, q)
    bias = _expanded(mask.bias, q, k)
    if (kernel := _kernel(q, k, v, mask, bias)) is not None:
        return kernel.forward(q, k, v, mask.causal, bias)
    scores = _scores(q, k, mask)
    lse = scores.logsumexp(-1)
    return _dropped(scores.sub_(lse.unsqueeze(-1)).exp_(), mask) @ v.to(scores.dtype), lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v of one block. out, lse: of *all* blocks of these queries; grad: of ``out``."""
    groups = k.shape[1]
    k, v = _repeated(k, q), _repeated(v, q)
    bias = _expanded(mask.bias, q, k)
    if (kernel := _kernel(q, k, v, mask, bias)) is not None:
        dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, mask.causal, bias)
    else:
        weights = _scores(q, k, mask).sub_(lse.unsqueeze(-1)).exp_()
        grad = grad.to(weights.dtype)
        delta = (grad * out).sum(-1, keepdim=True)
        dv = _dropped(weights, mask).transpose(-2, -1) @ grad
        of_weights = _dropped(grad @ v.to(weights.dtype).transpose(-2, -1), mask)
        of_scores = of_weights.sub_(delta).mul_(weights).mul_(1 / math.sqrt(q.shape[-1]))
        dq = of_scores @ k.to(weights.dtype)
        dk = of_scores.transpose(-2, -1) @ q.to(weights.dtype)
    return dq, _summed(dk, groups), _summed(dv, groups)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge the result of further keys into ``out`` and ``lse``, in place.

    The share of the new keys is 1 / (1 + exp(lse - more_lse)), which overflows nowhere as a sigmoid. ``lse`` minus the
    sigmoid's logarithm would be the sum's, too, but where all earlier keys are masked nothing would be left of it.
    """
    out.lerp_(more.to(out.dtype), (more_lse - lse).sigmoid().unsqueeze(-1).to(out.dtype))
    torch.logaddexp(lse, more_lse, out=lse)


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, bias: Tensor | None) -> BlockKernel | None:
    # No fused kernel takes dropout by position.
    return None if mask.kept is not None else kernel_of(q, k, v, mask.causal, bias)


def _scores(q: Tensor, k: Tensor, mask: BlockMask) -> Tensor:
    dtype = accumulated_in(q.dtype)
    scores = (q.to(dtype) @ k.to(dtype).transpose(-2, -1)).mul_(1 / math.sqrt(q.shape[-1]))
    if mask.causal:
        scores.add_(scores.new_full(scores.shape[-2:], -torch.inf).triu(1))
    return scores if mask.bias is None else scores.add_(mask.bias)


def _dropped(x: Tensor, mask: BlockMask) -> Tensor:
    if mask.kept is None:
        return x
    return x * mask.kept * (1 / (1 - mask.dropout) if mask.dropout < 1 else 0.0)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """``x`` with a head for each of q's."""
    times = q.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _summed(x: Tensor, groups: int) -> Tensor:
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).sum(2)  # type: ignore[no-untyped-call]


def _expanded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*q.shape[:3], k.shape[2])
