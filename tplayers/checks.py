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
