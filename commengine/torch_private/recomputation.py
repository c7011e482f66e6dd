"""Seeing each recomputation of ``torch.utils.checkpoint``, whatever of it torch calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint

from .names import PrivateName, private

#: what torch.utils.checkpoint calls for each recomputation: torch to 2.13, and from 2.14 on
RECOMPUTATION = ("_checkpoint_without_reentrant_generator", "_checkpoint_impl")


@contextlib.contextmanager
def watched_recomputation(see: Callable[[list[Any]], None]) -> Iterator[None]:
    """Within the block ``see`` gets the arguments of each call of ``torch.utils.checkpoint``, before it runs.

    Raises MissingInTorch where torch calls none of RECOMPUTATION, so that no recomputation stays unseen.
    """
    before = {name: getattr(checkpoint, name) for name in RECOMPUTATION if hasattr(checkpoint, name)}
    seen: list[str] = []

    def watched(name: str, *args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        see(private("tree_leaves")([args, kwargs]))
        return before[name](*args, **kwargs)

    for name in before:
        setattr(checkpoint, name, functools.partial(watched, name))
    try:
        checkpoint.checkpoint(torch.clone, torch.ones(()), use_reentrant=False)
        if not seen:
            PrivateName(f"torch.utils.checkpoint.{RECOMPUTATION[-1]}", "a trace that must see recomputations").missing()
        yield
    finally:
        for name, function in before.items():
            setattr(checkpoint, name, function)
