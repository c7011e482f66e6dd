"""Upsampling of split fields."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from commengine import CartesianGrid, Decomposition
from commengine.dtypes import wide
from tplayers.functions import widened
from tplayers.movement.transfer import memory_format
from tplayers.placement import require_one_of

from .geometry import Scaled, Span
from .layer import FieldLayer, narrowed, natural
from .taps import Taps

#: torch's names, which depend on the number of axes
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
#: the modes, and how many inputs on each side of its place an output reads
_AROUND = {"nearest": 0, "nearest-exact": 0, "linear": 1, "bilinear": 1, "trilinear": 1, "bicubic": 2}


class FieldUpsample(FieldLayer):
    """torch.nn.Upsample of a field that is split over ``grid``, by whole numbers.

    scale_factor: one whole number, or one for each axis.
    mode: torch's "nearest", "nearest-exact", "linear" (1 axis), "bilinear" or "bicubic" (2 axes) or "trilinear" (3);
        "linear" also stands for the linear one of 2 and 3 axes.
    align_corners: as torch's: the first and the last output lie on the first and the last input. Not of the modes that
        take the nearest input.
    padding_mode: "replicate" as torch, or "circular": interpolation then wraps around; not with align_corners.
    grid, input, output, errors: as of `FieldConv`.

    forward: x [batch, channels, *local block] -> [batch, channels, *local block of ``output``]. Collective.
    """

    def __init__(
        self,
        scale_factor: int | Sequence[int],
        grid: CartesianGrid,
        input: Decomposition,
        *,
        mode: str = "nearest",
        align_corners: bool = False,
        padding_mode: str = "replicate",
        output: Decomposition | None = None,
    ) -> None:
        super().__init__(grid, input)
        require_one_of(tuple(_AROUND), mode=mode)
        require_one_of(("replicate", "circular"), padding_mode=padding_mode)
        self.mode, self.padding_mode = _LINEAR[self.axes] if mode == "linear" else mode, padding_mode
        around = _AROUND[mode]
        if around and self.mode not in (_LINEAR[self.axes], "bicubic" if self.axes == 2 else None):
            fits = " or ".join((_LINEAR[self.axes], *["bicubic"] * (self.axes == 2)))
            raise ValueError(f"mode={mode!r} does not fit a field of {self.axes} axes: use {fits}")
        if align_corners and not around:
            raise ValueError(f"align_corners=True needs a linear mode or bicubic, not mode={mode!r}")
        if align_corners and padding_mode == "circular":
            raise ValueError("align_corners=True needs padding_mode='replicate': a circular field has no corners")
        self.scale, self.align_corners = natural(scale_factor, self.axes, "scale_factor", 1), align_corners
        rules = [Scaled(s, around, n if align_corners else 0) for s, n in zip(self.scale, input.shape, strict=True)]
        # At a physical border torch's interpolation repeats the last input itself.
        modes = [padding_mode if padding_mode == "circular" and around else "clipped"] * self.axes
        self.reads(rules, modes, output)
        parts = [(part.start, part.stop) for part in self.output.slices(grid.coords)]
        self._taps = []
        if align_corners:
            each = zip(rules, parts, self.local.span, input.shape, strict=True)
            self._taps = [_interpolation(rule, part, low, points) for rule, part, (low, _), points in each]
        self._wanted = [
            (start - read * scale, stop - start)
            for (start, stop), (read, _), scale in zip(parts, self.local.span, self.scale, strict=True)
        ]

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        if not self._taps:
            y = F.interpolate(self.local(x), scale_factor=[float(scale) for scale in self.scale], mode=self.mode)
            return narrowed(y, self._wanted)
        # torch would place the outputs between the corners of what this rank reads, and not of the field.
        x = widened(self.local(x))
        y = wide(x)
        for dim, taps in enumerate(self._taps, start=2):
            y = taps.sums(y, dim)
        return y.to(x.dtype).contiguous(memory_format=memory_format(x))


def _interpolation(rule: Scaled, outputs: Span, low: int, points: int) -> Taps:
    """Return the inputs and weights of this rank's ``outputs`` of an axis of ``points``, read from ``low`` on."""
    a, b, c = rule.centre()
    places, weights = [], []
    for output in range(*outputs):
        below, rest = divmod(a * output + b, c)
        first = below - rule.around + 1
        places.append([min(max(first + t, 0), points - 1) - low for t in range(2 * rule.around)])
        weights.append(_linear(rest / c) if rule.around == 1 else _cubic(rest / c))
    return Taps(places, weights)


def _linear(t: float) -> list[float]:
    """The weights of the inputs at 0 and 1 for an output at ``t``."""
    return [1 - t, t]


def _cubic(t: float) -> list[float]:
    """The weights of the inputs at -1, 0, 1 and 2 for an output at ``t``: Keys 1981, with torch's a = -0.75."""
    a = -0.75

    def near(x: float) -> float:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: float) -> float:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(1 + t), near(t), near(1 - t), far(2 - t)]
