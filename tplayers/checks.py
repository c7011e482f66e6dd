"""Checks of values, which do not make the host wait for a device."""

from __future__ import annotations

import torch
from torch import Tensor


def require_within(numbers: Tensor, end: int, what: str, ignore_index: int | None = None) -> None:
    """Raise ValueError if one of ``numbers`` lies outside 0 to ``end`` - 1, and is not ``ignore_index``.

    It looks at host tensors only, and not in a compiled graph, which cannot look at values.

    what: one of the numbers in words, for the message: "a token".
    """
    if torch.compiler.is_compiling() or not numbers.is_cpu:
        return
    outside, also = (numbers < 0) | (numbers >= end), ""
    if ignore_index is not None:
        outside, also = outside & (numbers != ignore_index), f" and is not ignore_index={ignore_index}"
    if bool(outside.any()):
        raise ValueError(f"{what} lies outside 0 to {end - 1}{also}")
