"""Runs whose bits do not depend on the layout (docs/same-bits.md)."""

from __future__ import annotations

from dataclasses import dataclass

from commengine.options.declared import option
from commengine.options.ranges import AtLeastOne


@dataclass(frozen=True)
class SameBitsOptions:
    """``--deterministic``, and the shards and parts in which such a run computes."""

    deterministic: bool = option(False, "the same bits at every layout of the ranks: see docs/same-bits.md")
    deterministic_shards: AtLeastOne | None = option(
        None, "with --deterministic: shards in which the model computes, a power of two that the tensor-parallel size "
        "divides (default: the smallest one from 4 on); with context groups that the product of both sizes divides",
    )  # fmt: skip
    deterministic_parts: AtLeastOne | None = option(
        None, "with --deterministic: parts of each sequence in which the model computes, a power of two that the "
        "context-parallel size divides (default: that size)",
    )  # fmt: skip
