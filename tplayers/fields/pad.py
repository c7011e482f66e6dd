"""Padding and cropping of split fields."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from commengine import CartesianGrid, Decomposition
from tplayers.placement import require_one_of

from .geometry import Sliding
from .layer import FieldLayer

#: torch's names of the paddings, and the names that `FieldConv` has for them
_MODES = {"constant": "zeros", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


class FieldPad(FieldLayer):
    """torch.nn.functional.pad along the axes of a field that is split over ``grid``.

    padding: as torch's: the points before and after the last axis, then those of the axis before it, and so on; axes
        that are not named have none; one number stands for all of them. A negative number crops, in mode "constant".
    mode, value: as torch's: "constant", "reflect", "replicate" or "circular", at the borders of the whole field.
    grid, input, output, errors: as of `FieldConv`. The new points belong to the ranks at the border.

    forward: x [batch, channels, *local block] -> [batch, channels, *local block of ``output``], in memory of its own.
    Collective.
    """

    def __init__(
        self,
        padding: int | Sequence[int],
        grid: CartesianGrid,
        input: Decomposition,
        *,
        mode: str = "constant",
        value: float = 0.0,
        output: Decomposition | None = None,
    ) -> None:
        super().__init__(grid, input)
        require_one_of(tuple(_MODES), mode=mode)
        flat = (padding,) * (2 * self.axes) if isinstance(padding, int) else tuple(padding)
        if len(flat) % 2 or len(flat) > 2 * self.axes or not all(isinstance(one, int) for one in flat):
            raise ValueError(f"padding={padding!r} needs two whole numbers for each of at most {self.axes} axes")
        if mode != "constant" and min(flat, default=0) < 0:
            raise ValueError(f"padding={padding!r} crops, which needs mode='constant', not {mode!r}")
        flat += (0,) * (2 * self.axes - len(flat))
        self.padding, self.mode, self.value = flat, mode, float(value)
        sides = list(zip(flat[::2], flat[1::2], strict=True))[::-1]
        rules = [Sliding(1, before=before, after=after) for before, after in sides]
        self.reads(rules, [_MODES[mode]] * self.axes, output, fill=self.value)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        y = self.local(x)
        native = [n for n in reversed(self.local.native) for _ in range(2)]
        y = F.pad(y, native, value=self.value) if any(native) else y
        return y.clone() if y is x else y
