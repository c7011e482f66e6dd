"""Routing: which k of E experts compute each token, and the weights of their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """The experts of n tokens.

    logits, probabilities: [n, E], and their softmax. experts: int64 [n, k], the numbers of a token's experts, the
    likeliest first. weights: [n, k], of their results. All but ``experts`` are float32, or float64 as the tokens are.
    """

    logits: Tensor
    probabilities: Tensor
    experts: Tensor
    weights: Tensor

    @property
    def num_experts(self) -> int:
        """E."""
        return self.logits.shape[1]


def route(
    x: Tensor, weight: Tensor, k: int, *, pre_softmax: bool = False,
    product: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> Routing:  # fmt: skip
    """Route each row of x [..., h] to the ``k`` experts with the largest logits ``x weight^T``; weight: [E, h].

    The weights are the softmax of these k logits, which add up to 1 (Jiang et al. 2024, arXiv 2401.04088, section 2.1).
    pre_softmax: they are the probabilities among all E experts instead, which add up to less (Fedus et al. 2022, arXiv
    2101.03961, equation 2). With k = 1 the others would be 1, and the router would get no gradient.
    product: of both arguments, [..., E], for these or for other rows.

    Also under ``torch.autocast`` it computes in float32 at least: in lower precision near ties go the other way.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        logits = product(x.to(dtype), weight.to(dtype)).flatten(0, -2)
        probabilities = logits.softmax(dim=-1)
        if pre_softmax:
            weights, experts = probabilities.topk(k, dim=-1)
        else:
            largest, experts = logits.topk(k, dim=-1)
            weights = largest.softmax(dim=-1)
    return Routing(logits, probabilities, experts, weights)
