"""Rotary positions: queries and keys turned by angles that grow with the position (Su et al. 2021, RoFormer)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from tplayers.placement import require_one_of

#: How the positions of a longer context than that of the training are brought back into its range: "linear" divides all
#: frequencies by a factor (Chen et al. 2023); "llama3" divides the low ones alone, as Llama 3.1 does.
ScalingKind: TypeAlias = Literal["linear", "llama3"]

SCALING_KINDS = get_args(ScalingKind)


@dataclass(frozen=True)
class RopeScaling:
    """Frequencies of rotary positions that are lower than those of the base; the defaults are Llama 3.1's.

    kind: "linear" or "llama3" (else ValueError). factor: frequencies are divided by it.

    Only for "llama3", with L = ``original_max_position_embeddings``, the context of the training: a wave longer than
    L / ``low_freq_factor`` is divided by the whole factor, a wave shorter than L / ``high_freq_factor`` stays, and in
    between the two are mixed.
    """

    kind: ScalingKind = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        require_one_of(SCALING_KINDS, rope_scaling=self.kind)
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"rope_scaling factor={self.factor} must be at least 1, and finite")
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError(
                f"rope_scaling low_freq_factor={self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor={self.high_freq_factor}"
            )
        if self.original_max_position_embeddings < 1:
            raise ValueError(
                f"rope_scaling original_max_position_embeddings={self.original_max_position_embeddings} must be at "
                "least 1"
            )

    def scaled(self, frequencies: Tensor) -> Tensor:
        """The lower frequencies, in radians per position, in place of ``frequencies``."""
        if self.kind == "linear":
            return frequencies / self.factor
        waves = self.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the context of the training
        kept = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


class Rotation(NamedTuple):
    """The rotation of some positions: the cosines and sines of their angles, [s, 1, 1, d / 2], or [s, b, 1, d / 2].

    The latter is for rows at different positions. d is the size of a head.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [s, b, heads, d], turned. Components j and j + d / 2 are a pair, as in Hugging Face's Llama."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1)


def frequencies(
    head_size: int, base: float, scaling: RopeScaling | None = None, device: torch.device | None = None
) -> Tensor:
    """The angles by which the pairs of a head turn from one position to the next, in radians: float64 [head_size / 2].

    Pair j turns by ``base`` ** (-2 j / head_size), unless ``scaling`` says otherwise. Raises ValueError for odd sizes.
    """
    require_pairs(head_size)
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64, device=device) / head_size
    found = float(base) ** -exponents
    return found if scaling is None else scaling.scaled(found)


def require_pairs(head_size: int, given: str = "") -> None:
    """Raise ValueError unless a head of this size consists of pairs. given: the settings that it follows from."""
    if head_size % 2:
        named = given or f"kv_channels={head_size}"
        raise ValueError(f"rotary positions need heads of an even size; {named} is odd")


def rotation(positions: Tensor, turns: Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation of ``positions``, int64 [s] or [b, s]. turns: of `frequencies`, on the same device.

    The angles, sines and cosines are computed in float64 and rounded to ``dtype`` once: in float32 the angle of a far
    position would be wrong by 1e-7 of the position.
    """
    rows = positions.unsqueeze(0) if positions.dim() == 1 else positions
    angles = rows.t()[..., None, None] * turns
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
