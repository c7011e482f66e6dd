"""BucketLayout: which parameters form a bucket, and where each of them lies in the bucket's flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from commengine import Communicator
from commengine.dtypes import HALF_TYPES
from tplayers import Placement

#: A parameter begins at a multiple of this number of elements in a flat buffer: 128 bytes in half precision, which
#: matrix products need to be fast.
ALIGNMENT = 64


@dataclass(frozen=True)
class Treatment:
    """How the values of a parameter are treated.

    decayed: AdamW's weight decay applies. It does not apply to parameters of one dimension: biases and norms (paper,
    section 4.2).
    sharded: the ranks of the tensor group hold different parts. partial: each rank of the tensor group computes only a
    part of the gradient, and the gradient is the sum of the parts. counted: the norm counts it; not the second copy of
    a tied weight. expert: the ranks of an expert group hold different ones.
    """

    decayed: bool
    sharded: bool
    partial: bool
    counted: bool = True
    expert: bool = False

    @classmethod
    def of(cls, placement: Placement, *, counted: bool = True, expert: bool = False) -> Treatment:
        """The treatment of a parameter with this placement."""
        return cls(len(placement.shape) > 1, placement.sharded, placement.partial, counted, expert)


class BucketLayout:
    """Parameters of one dtype that are reduced and updated together, and their places in flat buffers of ``size``.

    part: (name, parameter), in the order in which they lie in the buffers. placements: by those names.
    data: the ranks that hold the same parameters. shard: each of them keeps, and updates, only its share of masters and
        moments.
    masters: False: half-precision parameters have no masters, and are treated as others. flat: see below; True makes
        it so in any case, and a matrix that lies transposed in memory then lies so in the buffers, too. counted,
        expert: as in `Treatment`, of all of them.

    mixed: the parameters are in half precision, so they have masters, and gradient sums, in fp32.
    flat: the parameters are to be views of one buffer (`trainers.training.optimizer.FlatParameters`): those in half
        precision, and all if the optimizer is sharded or ``flat`` is given.
    starts: the first element of each parameter. mine: the elements of which this rank keeps masters and moments.
    """

    def __init__(
        self, part: list[tuple[str, nn.Parameter]], placements: Mapping[str, Placement], data: Communicator, *,
        shard: bool, masters: bool = True, flat: bool = False, counted: bool = True, expert: bool = False,
    ) -> None:  # fmt: skip
        first = part[0][1]
        self.names = {parameter: name for name, parameter in part}
        self.treatments = {
            parameter: Treatment.of(placements[name], counted=counted, expert=expert) for name, parameter in part
        }
        self.dtype, self.device = first.dtype, first.device
        self.mixed = masters and first.dtype in HALF_TYPES
        #: the dtype of masters, moments and gradient sums
        self.state_dtype = torch.float32 if self.mixed else first.dtype
        self.sharded = shard
        self.flat = flat or shard or self.mixed
        self._turned = {
            p for p in self.names if flat and p.dim() == 2 and not p.is_contiguous() and p.t().is_contiguous()
        }
        unit = ALIGNMENT if self.flat else 1
        shares = data.size if shard else 1
        self.starts: dict[nn.Parameter, int] = {}
        end = 0
        for parameter in self.names:
            self.starts[parameter] = end
            end += rounded_up(parameter.numel(), unit)
        self.size = rounded_up(end, unit * shares)
        width = self.size // shares
        first_of_mine = data.rank * width if shard else 0
        self.mine = slice(first_of_mine, first_of_mine + width)

    def view(self, flat: Tensor, parameter: nn.Parameter) -> Tensor:
        """The part of ``flat`` [size] that belongs to ``parameter``, in the parameter's shape.

        Outside of flat parameters it has the parameter's strides, too, if that is dense (``channels_last``): optimizers
        are slower if a gradient is not laid out as its parameter.
        """
        start = self.starts[parameter]
        part = flat[start : start + parameter.numel()]
        if parameter in self._turned:
            return part.view(parameter.shape[::-1]).t()
        return part.view(parameter.shape) if self.flat else viewed_as(part, parameter)

    def elements(self, parameter: nn.Parameter, values: Tensor) -> Tensor:
        """``values``, in the shape of ``parameter``, in the order of its part of a flat buffer: [elements].

        A copy, unless they already lie so.
        """
        return (values.t() if parameter in self._turned else values).reshape(-1)

    def stretches(self) -> Iterator[tuple[Treatment, slice]]:
        """The stretches of ``mine`` that are treated alike; each slice counts from the start of ``mine``.

        The padding after a parameter, all zeros, belongs to the parameter's stretch.
        """
        found: list[tuple[Treatment, int]] = []
        for parameter, start in self.starts.items():
            treatment = self.treatments[parameter]
            if not found or found[-1][0] != treatment:
                found.append((treatment, start))
        ends = [start for _, start in found[1:]] + [self.size]
        for (treatment, start), end in zip(found, ends, strict=True):
            low, high = max(start, self.mine.start), min(end, self.mine.stop)
            if low < high:
                yield treatment, slice(low - self.mine.start, high - self.mine.start)


def parts(
    parameters: Iterable[tuple[str, nn.Parameter]], size: int, kind: Callable[[str], object] = lambda _: None
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Cut ``parameters`` into runs of one dtype and at most ``size`` elements; a larger parameter is a run alone.

    kind: of a name; all of a run have one.
    """
    part: list[tuple[str, nn.Parameter]] = []
    elements = 0
    for name, parameter in parameters:
        full = elements + parameter.numel() > size
        if part and (full or part[0][1].dtype != parameter.dtype or kind(part[0][0]) != kind(name)):
            yield part
            part, elements = [], 0
        part.append((name, parameter))
        elements += parameter.numel()
    if part:
        yield part


def viewed_as(flat: Tensor, one: Tensor) -> Tensor:
    """``flat`` [elements of ``one``] as a tensor of the shape of ``one``, with its strides if it is dense."""
    order = sorted(range(one.dim()), key=one.stride, reverse=True)
    if one.is_contiguous() or not one.permute(order).is_contiguous():
        return flat.view(one.shape)
    return flat.as_strided(one.shape, one.stride(), flat.storage_offset())


def put_back(one: Tensor, place: Tensor, address: int) -> bool:
    """Let ``one``, which was the view ``place`` of a buffer at ``address``, be that again, with the values it has now.

    A program may give it other memory, as ``module.to(...)`` does. False: it has another dtype, shape or device now.
    """
    if one.data_ptr() != address:
        if (one.dtype, one.shape, one.device) != (place.dtype, place.shape, place.device):
            return False
        place.copy_(one.detach())
        one.data = place
    return True


def new_buffer(size: int, dtype: torch.dtype, device: torch.device, data: Communicator) -> Tensor:
    """A flat buffer of zeros. Collective over ``data``.

    On the host it lies in memory that the group shares, so that collectives do not copy what is sent from it.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return data.empty((size,), dtype).zero_()


def rounded_up(number: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not below ``number``."""
    return -(-number // unit) * unit
