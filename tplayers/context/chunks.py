"""SequenceChunks: which positions of a sequence each rank of a context group has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceChunks:
    """How the positions of a sequence lie on ``ranks`` ranks, which have equally many each.

    zigzag: the sequence has 2 * ``ranks`` chunks, and rank r has number r and number 2 * ranks - 1 - r. Under a causal
    mask late positions look at more than early ones do, and so all ranks have the same work (Brandon et al. 2023,
    arXiv 2311.09431, balance it with stripes instead). False: rank r has the r-th part of the sequence.
    """

    ranks: int
    zigzag: bool = False

    def require_fitting(self, s: int) -> None:
        """Raise ValueError if a sequence of ``s`` positions has no equal chunks."""
        count = self.ranks * (2 if self.zigzag else 1)
        if s % count:
            raise ValueError(
                f"sequence_length={s} has no {count} equal chunks, {count // self.ranks} for each of the {self.ranks} "
                f"ranks of a context group; valid: a multiple of {count}"
            )

    def positions(self, rank: int, s: int, device: torch.device | None = None) -> Tensor:
        """The positions of ``rank``, ascending: int64 [s / ranks]. Raises ValueError as `require_fitting`."""
        self.require_fitting(s)
        if not self.zigzag:
            return torch.arange(rank * s // self.ranks, (rank + 1) * s // self.ranks, device=device)
        size = s // (2 * self.ranks)
        starts = (rank * size, (2 * self.ranks - 1 - rank) * size)
        return torch.cat([torch.arange(start, start + size, device=device) for start in starts])

    def take(self, whole: Tensor, rank: int, dim: int) -> Tensor:
        """What ``rank`` has of ``whole``, which has the sequence along ``dim``. Differentiable."""
        return whole.index_select(dim, self.positions(rank, whole.shape[dim], whole.device))
