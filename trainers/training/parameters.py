"""The owners of a bucket's values and optimizer state: parameters, fp32 masters, and AdamW's moments.

`PlainParameters` leaves the parameters where they are; `FlatParameters` makes them views of one buffer, so that casting
and gathering them is one call. Both have the same methods. The gradients belong to
`trainers.training.reduction.GradientBuckets`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from commengine import Communicator, Stream, Work

from .layout import BucketLayout, new_buffer

#: AdamW's tensors that are placed as their parameter is
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Updated:
    """Values that AdamW updates as one tensor. ``values.grad`` is their gradient, of the same dtype and shape.

    decayed: with weight decay. moments: by their names in `MOMENTS`, of the shape of ``values``.
    """

    values: Tensor
    decayed: bool
    moments: Mapping[str, Tensor]


class PlainParameters:
    """Parameters in single or double precision that AdamW updates where they are, and their moments."""

    kinds = MOMENTS

    def __init__(self, layout: BucketLayout) -> None:
        self.layout = layout
        self._of = {
            parameter: Updated(parameter, treatment.decayed, {kind: torch.zeros_like(parameter) for kind in MOMENTS})
            for parameter, treatment in layout.treatments.items()
        }
        #: what AdamW updates
        self.updated = list(self._of.values())

    def publish(self, stream: Stream | None) -> None:
        """Do nothing: AdamW has updated the parameters themselves."""

    def tensors(self, kind: str, *, wanted: bool) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter and its state ``kind``, in its shape. wanted: whether this rank needs them."""
        if wanted:
            yield from ((parameter, one.moments[kind]) for parameter, one in self._of.items())

    def fill(self, kind: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set state ``kind`` of ``parameter``; "master" is the parameter itself. values: in the parameter's shape."""
        (parameter if kind == "master" else self._of[parameter].moments[kind]).copy_(values)


class FlatParameters:
    """Parameters that are views of one buffer [size], and this rank's share of their masters and moments.

    gradient: the reduced gradient of this rank's share (`BucketLayout.mine`). data: the data group.

    The parameters must have their values already. The masters of half-precision parameters copy them, in fp32; of other
    parameters they are the parameters themselves.
    """

    def __init__(self, layout: BucketLayout, gradient: Tensor, data: Communicator) -> None:
        self.layout, self.data = layout, data
        self.kinds = (*MOMENTS, "master") if layout.mixed else MOMENTS
        self.parameters = new_buffer(layout.size, layout.dtype, layout.device, data)
        for parameter in layout.names:
            view = layout.view(self.parameters, parameter)
            view.copy_(parameter.detach())
            parameter.data = view
        self._mine = self.parameters[layout.mine]
        master = self._mine.float() if layout.mixed else self._mine
        self.state = {"master": master} | {kind: torch.zeros_like(master) for kind in MOMENTS}
        #: what AdamW updates: stretches of this rank's masters
        self.updated: list[Updated] = []
        for treatment, stretch in layout.stretches():
            values = master[stretch]
            values.grad = gradient[stretch]
            moments = {kind: self.state[kind][stretch] for kind in MOMENTS}
            self.updated.append(Updated(values, treatment.decayed, moments))

    def publish(self, stream: Stream | None) -> Work | None:
        """Cast this rank's masters into the parameters; if sharded, start to gather the parameters of all ranks.

        Collective over the data group if sharded. The gather runs on ``stream`` if there is one. Returns its Work: the
        parameters are whole when it is done.
        """
        if self.layout.mixed:
            self._mine.copy_(self.state["master"])
        return self.data.all_gather(self.parameters, self._mine, stream=stream) if self.layout.sharded else None

    def tensors(self, kind: str, *, wanted: bool) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter and its whole state ``kind``, in its shape, on rank 0 of the data group; nothing elsewhere.

        wanted: true on rank 0 only. Collective over the data group if sharded: every rank must exhaust it.
        """
        whole = self.state[kind]
        if self.layout.sharded and self.data.size > 1:
            mine = whole
            whole = mine.new_empty(self.layout.size if wanted else 0)
            self.data.gather(whole if wanted else None, mine)
        if wanted:
            yield from ((parameter, self.layout.view(whole, parameter)) for parameter in self.layout.names)

    def fill(self, kind: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set this rank's share of state ``kind`` of ``parameter``; with "master", set the whole parameter too.

        values: of the whole parameter, in its shape.
        """
        layout = self.layout
        start = layout.starts[parameter]
        low, high = max(start, layout.mine.start), min(start + parameter.numel(), layout.mine.stop)
        if low < high:
            kept = self.state[kind][low - layout.mine.start : high - layout.mine.start]
            kept.copy_(layout.elements(parameter, values)[low - start : high - start])
        if kind == "master":
            layout.view(self.parameters, parameter).copy_(values)
