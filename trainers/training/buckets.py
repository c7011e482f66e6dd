"""Parameters in runs of one dtype, and the flat buffers that hold their gradients, masters and moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from commengine import Communicator
from commengine.dtypes import HALF_TYPES
from tplayers import Placement

#: AdamW's tensors that are placed as their parameter is
MOMENTS = ("exp_avg", "exp_avg_sq")

#: elements at whose multiples a parameter begins in a flat buffer: 128 bytes in half, for matrix products' sake
ALIGNMENT = 64


@dataclass(frozen=True)
class Kind:
    """What decides how values are treated.

    decayed: by AdamW; parameters of one dimension, biases and norms, are not (paper, section 4.2).
    sharded: the ranks of the tensor group hold different parts. partial: each rank of it computes only a part of the
    gradient.
    """

    decayed: bool
    sharded: bool
    partial: bool

    @classmethod
    def of(cls, placement: Placement) -> Kind:
        """The kind of a parameter."""
        return cls(len(placement.shape) > 1, placement.sharded, placement.partial)


@dataclass(frozen=True)
class Segment:
    """Values of one kind that AdamW updates as one tensor: a parameter, or a stretch of a flat buffer.

    ``values.grad`` is their gradient, of the same dtype and shape.
    """

    values: Tensor
    kind: Kind


class Bucket:
    """Parameters of one dtype that are reduced and updated together.

    part: (name, parameter), as they follow each other in flat buffers. placements: by those names. data: the group.
    shard: this rank of the data group keeps, and updates, only its part of masters and moments.

    Parameters in single or double precision that are not sharded stay where they are, and so do AdamW's moments; their
    gradients are views of ``gradients`` [size], or, in a data group of one rank, which sends nothing, autograd's own
    tensors (``gradients`` is None). All others become views of ``parameters`` [size], so that casting and gathering
    them is one call. ``state`` then has this rank's ``mine`` of ``size`` elements of "master", "exp_avg" and
    "exp_avg_sq", the master of a half in fp32, of others the parameters themselves; and ``gradients`` has the dtype
    of the masters.
    """

    def __init__(
        self,
        part: list[tuple[str, nn.Parameter]],
        placements: Mapping[str, Placement],
        data: Communicator,
        *,
        shard: bool,
    ) -> None:
        first = part[0][1]
        self.names = {parameter: name for name, parameter in part}
        self._kinds = {parameter: Kind.of(placements[name]) for name, parameter in part}
        self.dtype = first.dtype
        self.mixed = first.dtype in HALF_TYPES
        self.sharded = shard
        self.flat = shard or self.mixed
        self.waiting: set[nn.Parameter] = set()  # for their last gradient of this step
        self.fresh: set[nn.Parameter] = set()  # without a gradient in this step yet; of mixed precision only
        unit = ALIGNMENT if self.flat else 1
        parts = data.size if shard else 1
        self.starts: dict[nn.Parameter, int] = {}
        end = 0
        for parameter in self.names:
            self.starts[parameter] = end
            end += _rounded_up(parameter.numel(), unit)
        self.size = _rounded_up(end, unit * parts)
        width = self.size // parts
        first_of_mine = data.rank * width if shard else 0
        self.mine = slice(first_of_mine, first_of_mine + width)
        self.gradients: Tensor | None = None
        if self.flat or data.size > 1:
            wide = torch.float32 if self.mixed else self.dtype
            self.gradients = _zeros(self.size, wide, first.device, data)
        self.parameters: Tensor | None = None
        self.state: dict[str, Tensor] = {}
        self.segments = [Segment(parameter, kind) for parameter, kind in self._kinds.items()]
        if self.flat:
            self._flatten(data)

    @property
    def reduced(self) -> Tensor:
        """The gradients of ``mine``, once they are summed over the data group."""
        assert self.gradients is not None
        return self.gradients[self.mine]

    def view(self, flat: Tensor, parameter: nn.Parameter) -> Tensor:
        """The part of ``flat`` [size] that is ``parameter``'s, in its shape."""
        start = self.starts[parameter]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def zero(self) -> None:
        """Start a step: all gradients are 0."""
        if self.mixed or self.gradients is None:
            self.fresh = set(self.names)
            for parameter in self.names:
                parameter.grad = None
            return
        self.gradients.zero_()
        for parameter in self.names:  # whoever set a gradient to None took it out of the bucket
            view = self.view(self.gradients, parameter)
            if parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr():
                parameter.grad = view

    def accumulate(self, parameter: nn.Parameter) -> None:
        """Move the half gradient that autograd left into the fp32 sum. The first of a step saves a zeroing."""
        assert self.gradients is not None
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        total = self.view(self.gradients, parameter)
        if parameter in self.fresh:
            self.fresh.discard(parameter)
            total.copy_(grad)
        else:
            total.add_(grad)

    def publish(self) -> None:
        """Cast this rank's masters into the parameters."""
        if self.mixed:
            assert self.parameters is not None
            self.parameters[self.mine].copy_(self.state["master"])

    def fill(self, kind: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set what this rank keeps of ``parameter``'s ``kind`` of state, of a flat bucket; with "master" itself too."""
        assert self.parameters is not None
        start, end = self.starts[parameter], self.starts[parameter] + parameter.numel()
        low, high = max(start, self.mine.start), min(end, self.mine.stop)
        if low < high:
            kept = self.state[kind][low - self.mine.start : high - self.mine.start]
            kept.copy_(values.reshape(-1)[low - start : high - start])
        if kind == "master":
            self.view(self.parameters, parameter).copy_(values)

    def _flatten(self, data: Communicator) -> None:
        """Make the parameters views of one buffer, and allocate the state of this rank's part of it."""
        assert self.gradients is not None
        self.parameters = _zeros(self.size, self.dtype, self.gradients.device, data)
        for parameter in self.names:
            view = self.view(self.parameters, parameter)
            view.copy_(parameter.detach())
            parameter.data = view
        mine = self.parameters[self.mine]
        self.state["master"] = mine.float() if self.mixed else mine
        for kind in MOMENTS:
            self.state[kind] = torch.zeros_like(self.state["master"])
        self.segments = []
        for kind_of_run, start, end in self._runs():
            values = self.state["master"][start:end]
            values.grad = self.reduced[start:end]
            self.segments.append(Segment(values, kind_of_run))

    def _runs(self) -> Iterator[tuple[Kind, int, int]]:
        """(Kind, start, end) within this rank's part. Padding, all zeros, belongs to the parameter before it."""
        runs: list[tuple[Kind, int]] = []
        for parameter, start in self.starts.items():
            kind = self._kinds[parameter]
            if not runs or runs[-1][0] != kind:
                runs.append((kind, start))
        ends = [start for _, start in runs[1:]] + [self.size]
        for (kind, start), end in zip(runs, ends, strict=True):
            low, high = max(start, self.mine.start), min(end, self.mine.stop)
            if low < high:
                yield kind, low - self.mine.start, high - self.mine.start


def parts(parameters: Iterable[tuple[str, nn.Parameter]], size: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Runs of one dtype, of at most ``size`` elements each (or one parameter)."""
    part: list[tuple[str, nn.Parameter]] = []
    elements = 0
    for name, parameter in parameters:
        full = elements + parameter.numel() > size
        if part and (full or part[0][1].dtype != parameter.dtype):
            yield part
            part, elements = [], 0
        part.append((name, parameter))
        elements += parameter.numel()
    if part:
        yield part


def _zeros(size: int, dtype: torch.dtype, device: torch.device, data: Communicator) -> Tensor:
    """A flat buffer, on the host in memory that the data group shares: what is sent from there is not copied."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return data.empty((size,), dtype).zero_()


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
