"""Checks of values, which do not make the host wait for a device."""

from __future__ import annotations

import torch
from torch import Tensor


def require_within(numbers: Tensor, end: int, what: str) -> None:
    """Raise ValueError if one of ``numbers`` lies outside 0 to ``end`` - 1.

    It looks at host tensors only, and not in a compiled graph, which cannot look at values.

    what: one of the numbers in words, for the message: "a token".
    """
    if not torch.compiler.is_compiling() and numbers.is_cpu and bool(((numbers < 0) | (numbers >= end)).any()):
        raise ValueError(f"{what} lies outside 0 to {end - 1}")


def require_targets(target: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise ValueError for a target of a cross-entropy that is outside the vocabulary, as `require_within` does."""
    if torch.compiler.is_compiling() or not target.is_cpu:
        return
    if bool((((target < 0) | (target >= vocab_size)) & (target != ignore_index)).any()):
        raise ValueError(f"a target lies outside 0 to {vocab_size - 1} and is not ignore_index={ignore_index}")
