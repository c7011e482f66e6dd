"""BucketLayout: which parameters form a bucket, and where each of them lies in the bucket's flat buffers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
        expert: as in `Treatment`, of all of them. apart: the names of `in_other_orders`.

    mixed: the parameters are in half precision, so they have masters, and gradient sums, in fp32.
    flat: the parameters are to be views of one buffer (`trainers.training.optimizer.FlatParameters`): those in half
        precision, and all if the optimizer is sharded or ``flat`` is given.
    starts: the first element of each parameter. mine: the elements of which this rank keeps masters and moments.
    """

    def __init__(
        self, part: list[tuple[str, nn.Parameter]], placements: Mapping[str, Placement], data: Communicator, *,
        shard: bool, masters: bool = True, flat: bool = False, counted: bool = True, expert: bool = False,
        apart: Collection[str] = (),
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
        self._in_order = {p for p, name in self.names.items() if self.flat or name in apart}
        self._turned = {
            p
            for p, name in self.names.items()
            if flat and name not in apart and p.dim() == 2 and not p.is_contiguous() and p.t().is_contiguous()
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

        Outside of flat parameters it has the parameter's strides, too, if that is dense (``channels_last``) and lies so
        on all ranks: torch's fused optimizers need a gradient that is laid out as its parameter.
        """
        start = self.starts[parameter]
        part = flat[start : start + parameter.numel()]
        if parameter in self._turned:
            return part.view(parameter.shape[::-1]).t()
        return part.view(parameter.shape) if parameter in self._in_order else viewed_as(part, parameter)

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
    if one.is_contiguous() or not _dense(one):
        return flat.view(one.shape)
    return flat.as_strided(one.shape, one.stride(), flat.storage_offset())


def _dense(one: Tensor) -> bool:
    return one.permute(_slowest_first(one)).is_contiguous()


def _slowest_first(one: Tensor) -> list[int]:
    return sorted(range(one.dim()), key=one.stride, reverse=True)


def memory_order(one: Tensor) -> list[int]:
    """The dimensions of more than one element, from the slowest in memory to the fastest: those of its gradient, too.

    Of a tensor that is not dense, they are those of a contiguous one.
    """
    own = not one.is_contiguous() and _dense(one)
    return [dim for dim in (_slowest_first(one) if own else range(one.dim())) if one.shape[dim] > 1]


def lies_as(one: Tensor, parameter: Tensor) -> bool:
    """Whether ``one`` lies in memory as a gradient of ``parameter`` does."""
    return one.stride() == parameter.stride() or memory_order(one) == memory_order(parameter)


def unusable(parameter: Tensor) -> str | None:
    """Why flat buffers cannot carry the values of ``parameter``; None if they can."""
    if parameter.layout is not torch.strided or parameter.is_quantized:
        return "is sparse, or quantized: only dense parameters of plain numbers are shared"
    # A class that takes part in torch's dispatch keeps its numbers elsewhere, such as in other tensors.
    if type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {type(parameter).__name__}, which implements torch's operations itself"
    sizes = sorted((stride, size) for size, stride in zip(parameter.shape, parameter.stride(), strict=True) if size > 1)
    reached = 0
    for stride, size in sizes if parameter.numel() else ():
        if stride <= reached:
            return "has elements that share memory, such as those of expand(): clone() it"
        reached += (size - 1) * stride
    return None


def in_other_orders(named: Mapping[str, Tensor], data: Communicator) -> set[str]:
    """The names of parameters that lie in memory in another order on another rank, such as transposed. Collective.

    named: the same names on every rank of ``data``. In a flat buffer these parameters lie as contiguous ones do: an
    element must have one place on all ranks. Raises CollectiveError on every rank if one is `unusable` on a rank.
    """
    if data.size == 1:
        return set()
    problem = next((f"{name} {why}" for name, one in named.items() if (why := unusable(one)) is not None), None)
    orders = [zlib.crc32(repr(memory_order(one)).encode()) if problem is None else 0 for one in named.values()]
    low, high = data.extremes([problem is not None, zlib.crc32(repr(orders).encode())])
    if high[0]:
        data.compare("the parameters", problem)
    if low[1] == high[1]:
        return set()
    data.compare(f"the parameters {', '.join(named)}")
    return {name for name, one, other in zip(named, *data.extremes(orders), strict=True) if one != other}


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
