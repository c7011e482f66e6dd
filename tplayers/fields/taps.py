"""Outputs that each take a few inputs of one axis, for what torch's kernels cannot do on a part of a field.

torch's adaptive pooling and its interpolation with align_corners place an output by the sizes of the tensor that they
get. On a rank this tensor is a part of the field, so the places and the weights are computed here from the whole one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Taps:
    """One axis of this rank: output o takes the inputs ``places[o]`` of what the rank reads, with ``weights[o]``.

    All outputs take equally many; a place may be named several times.
    """

    def __init__(self, places: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> None:
        self._places = torch.tensor(places, dtype=torch.int64, device="cpu")
        self._weights = torch.tensor(weights, dtype=torch.float64, device="cpu")
        flat = [place for window in places for place in window]
        #: as many inputs as there are, each once and in order: nothing has to be copied
        self._ordered = len(flat) if flat == list(range(len(flat))) else 0

    def windows(self, x: Tensor, dim: int) -> Tensor:
        """Return the inputs of each output: ``dim`` of ``x`` becomes two, [outputs, inputs of each]."""
        if x.shape[dim] != self._ordered:
            self._places = self._places.to(x.device)
            x = x.index_select(dim, self._places.flatten())
        return x.reshape(*x.shape[:dim], *self._places.shape, *x.shape[dim + 1 :])

    def sums(self, x: Tensor, dim: int) -> Tensor:
        """Return the weighted sum of each output's inputs, along ``dim``."""
        self._weights = self._weights.to(x.device)
        weights = self._weights.to(x.dtype)
        return (self.windows(x, dim) * weights.view(*weights.shape, *(1,) * (x.dim() - dim - 1))).sum(dim + 1)
