"""The memory of new parameters: full of NaN, or left as it is because a file fills it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

_filled: ContextVar[bool] = ContextVar("filled", default=True)


@contextlib.contextmanager
def unfilled_parameters() -> Iterator[None]:
    """Within the block new parameters of this thread hold any values: those of a model that is read right afterwards.

    To write NaN first takes a fourth of the time in which a model is loaded.
    """
    token = _filled.set(False)
    try:
        yield
    finally:
        _filled.reset(token)


def parameter_memory(shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    """A new tensor for a parameter: NaN everywhere, or within `unfilled_parameters` any values."""
    if _filled.get():
        return torch.full(tuple(shape), math.nan, dtype=dtype)
    return torch.empty(tuple(shape), dtype=dtype)
