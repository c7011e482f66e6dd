"""The learning rate as a function of the step alone."""

from __future__ import annotations

import math


def learning_rate(
    iteration: int, *, lr: float, min_lr: float, style: str, warmup_iters: int, decay_iters: int
) -> float:
    """The rate of step ``iteration`` (from 0): linear warm-up to ``lr``, then decay to ``min_lr`` at ``decay_iters``.

    style: "cosine", "linear", or "constant" (``lr`` after the warm-up; ``min_lr`` is not used). The decay is
    Megatron-LM's. Megatron-LM's warm-up is one step behind this one, and begins with a step of rate 0.
    """
    if iteration < warmup_iters:
        return lr * (iteration + 1) / warmup_iters
    if style == "constant":
        return lr
    span = max(decay_iters - warmup_iters, 1)
    progress = min((iteration - warmup_iters) / span, 1.0)
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if style == "cosine" else 1.0 - progress
    return min_lr + share * (lr - min_lr)
