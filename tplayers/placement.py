"""Placement: the part of a global tensor that a parameter holds.

Initial values, the gradient norm, checkpoints and conversions all derive from this one record. The module keeps it by
the parameter's name, because parameters are replaced (``load_state_dict(assign=True)``, ``copy.deepcopy``) and names
are not.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from commengine import Communicator
from commengine.torch_private import private

from .rng import generator


@dataclass(frozen=True)
class Normal:
    """Initial values from N(0, std^2)."""

    std: float

    def draw(self, shape: Sequence[int], seed: int, name: str) -> Tensor:
        values = torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
        return values.normal_(0.0, self.std, generator=generator(seed, name))


@dataclass(frozen=True)
class Constant:
    """The same initial value everywhere."""

    value: float

    def draw(self, shape: Sequence[int], seed: int, name: str) -> Tensor:
        return torch.full(tuple(shape), self.value, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class Placement:
    """A parameter's part of a global tensor.

    shape: of the global tensor.
    init: how its initial values are drawn.
    dim: the dimension of ``view`` that is split; None for a parameter that every rank holds whole.
    index, count: this rank holds part ``index`` of ``count`` equal parts.
    view: the shape in which the global tensor is split. It differs from ``shape`` if the parts are not contiguous
        blocks of a dimension of ``shape``: (3, hidden, hidden) with dim 1 for a fused QKV weight [3 * hidden, hidden].
    padded: the sizes of ``view`` after zeros are appended to dimensions from ``dim`` on; () for none. The parts then
        hold these zeros, too, and the global tensor does not. A part is one of ``count`` equal stretches of the padded
        dimensions from ``dim`` on, in row-major order; without zeros these are the equal parts of ``dim``.
    partial: each rank of the tensor group computes only its sequence shard's part of the gradient, and the parts must
        be summed over the group (`sum_partial_gradients`). It says nothing about the values, so two placements that
        differ only in it are equal.
    """

    shape: tuple[int, ...]
    init: Normal | Constant = field(default=Constant(0.0), compare=False)
    dim: int | None = None
    index: int = 0
    count: int = 1
    view: tuple[int, ...] = ()
    padded: tuple[int, ...] = ()
    partial: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not self.view:
            object.__setattr__(self, "view", self.shape)
        if math.prod(self.view) != math.prod(self.shape):
            raise ValueError(f"a tensor of shape {self.shape} cannot be viewed as {self.view}")
        if self.padded == self.view:
            object.__setattr__(self, "padded", ())
        if self.padded:
            self._require_padded()
        elif self.dim is not None and self.view[self.dim] % self.count:
            raise ValueError(f"dimension {self.dim} of {self.view} does not divide into {self.count} equal parts")
        if math.prod(self.local_shape) != math.prod(self.part_view):
            split = f"one of {self.count} parts of dim {self.dim} of {self.view}"
            raise ValueError(f"no shape like {self.shape} holds {split}")
        if self.partial and self.dim is not None:
            raise ValueError("a parameter whose gradient is partial is held whole by every rank: dim must be None")

    @property
    def sharded(self) -> bool:
        """Whether the ranks hold different parts."""
        return self.dim is not None

    def _require_padded(self) -> None:
        view, sizes, first = self.view, self.padded, len(self.view) if self.dim is None else self.dim
        if len(sizes) != len(view) or sizes[:first] != view[:first] or any(map(int.__lt__, sizes, view)):
            raise ValueError(f"{view} cannot be padded to {sizes}: only dimensions from {self.dim} on may grow")
        if math.prod(sizes[first:]) % self.count:
            raise ValueError(f"dimensions {self.dim} and later of {sizes} do not divide into {self.count} equal parts")

    @property
    def stretch(self) -> int:
        """The elements of a part for each index of the dimensions before ``dim``. ``dim`` must be given."""
        return math.prod((self.padded or self.view)[self.dim :]) // self.count

    def runs(self) -> list[tuple[int, int, int]]:
        """(First in the global tensor, first in this rank's stretch, number) of the stretch's runs of real elements.

        ``dim`` must be given. They are the same, counted from there, for each index of the dimensions before it.
        """
        low, high = self.index * self.stretch, (self.index + 1) * self.stretch
        cut = ((real - place, max(place, low), min(place + length, high)) for real, place, length in self._real_runs())
        return [(start + back, start - low, end - start) for back, start, end in cut if start < end]

    def _real_runs(self) -> list[tuple[int, int, int]]:
        """(First without zeros, first with zeros, number) of the runs of real elements in all ranks' stretches."""
        view, padded, places = self.view[self.dim :], (self.padded or self.view)[self.dim :], [0]
        last = max((d for d in range(len(view)) if view[d] != padded[d]), default=0)
        length, width = math.prod(view[last:]), math.prod(padded[last:])  # they differ in dimension ``last`` alone
        for size, more in zip(view[:last], padded[:last], strict=True):
            places = [place * more + n for place in places for n in range(size)]
        return [(number * length, place * width, length) for number, place in enumerate(places)]

    @property
    def part_view(self) -> tuple[int, ...]:
        """The shape of this rank's part of ``view``; if more dimensions than ``dim`` are padded, these are one."""
        sizes = list(self.padded or self.view)
        if self.dim is not None:
            if self.padded[self.dim :][1:] not in ((), self.view[self.dim :][1:]) or sizes[self.dim] % self.count:
                return (*self.view[: self.dim], self.stretch)
            sizes[self.dim] //= self.count
        return tuple(sizes)

    @property
    def part_start(self) -> tuple[int, ...]:
        """Where this rank's part begins in ``view``."""
        starts = [0] * len(self.view)
        if self.dim is not None:
            starts[self.dim] = self.index * self.part_view[self.dim]
        return tuple(starts)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the parameter: the global tensor's, with the dimension that is split padded, and divided."""
        sizes = list(self.shape)
        if self.padded:
            before = math.prod(self.view[: self.dim])
            within = next(d for d in range(len(sizes)) if math.prod(sizes[: d + 1]) > before)
            sizes[within] = sizes[within] * math.prod(self.padded) // math.prod(self.view) // self.count
        elif self.dim is not None:
            end = math.prod(self.view[: self.dim]) * self.view[self.dim]
            within = next(d for d in range(len(sizes)) if math.prod(sizes[: d + 1]) >= end)
            sizes[within] //= self.count
        return tuple(sizes)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of the global tensor ``whole``, in the parameter's shape.

        whole: of `shape`, of any dtype and on any device, which the result has, too; the two may share memory. It
        communicates nothing. Raises ValueError if ``whole`` has another shape.
        """
        if tuple(whole.shape) != self.shape:
            raise ValueError(f"expected a global tensor of shape {self.shape}, got {tuple(whole.shape)}")
        if self.dim is None:
            return whole
        whole = whole.reshape(self.view)
        if self.padded:
            filled = whole.new_zeros(self.padded)
            filled[tuple(map(slice, self.view))] = whole
            whole = filled
        rows = whole.reshape(math.prod(self.view[: self.dim]), self.count * self.stretch)
        return rows.narrow(1, self.index * self.stretch, self.stretch).reshape(self.local_shape)

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """The global tensor, from the ``count`` ranks' parts in rank order."""
        if self.dim is None:
            return parts[0]
        outer = math.prod(self.view[: self.dim])
        rows = torch.cat([part.reshape(outer, self.stretch) for part in parts], dim=1)
        return self.without_padding(rows).reshape(self.shape)

    def without_padding(self, rows: Tensor) -> Tensor:
        """The real elements of ``rows`` [n, values], which the parts of all ranks have side by side: [n, fewer values].

        They may be some of the tensor's rows, and an element may be several values, such as its bytes.
        """
        padded, real = (self.padded or self.view)[self.dim :], self.view[self.dim :]
        width = rows.shape[1] // max(math.prod(padded), 1)
        whole = rows.reshape(len(rows), *padded, width)
        return whole[(slice(None), *map(slice, real))].reshape(len(rows), math.prod(real) * width)


@dataclass(frozen=True)
class PaddedFeatures:
    """Features of a layer that are viewed as ``sizes`` and filled up with zeros to ``padded`` before they are split."""

    sizes: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def total(self) -> int:
        """The number of padded features."""
        return math.prod(self.padded)


def add_parameter(module: nn.Module, name: str, placement: Placement | None, dtype: torch.dtype | None = None) -> None:
    """Give ``module`` a parameter ``name`` with this placement, and the record that `placements` reads.

    placement: None for a parameter that the module goes without; it is then None.
    The parameter holds NaN until `initialize` or a checkpoint fills it, so that nobody trains one that was forgotten.
    Within `unfilled_parameters` it holds any values.
    """
    if placement is None:
        module.register_parameter(name, None)
        return
    values = torch.empty(placement.local_shape, dtype=dtype)
    module.register_parameter(name, nn.Parameter(values.fill_(math.nan) if _filled.get() else values))
    vars(module).setdefault(_RECORDS, {})[name] = placement


_filled: ContextVar[bool] = ContextVar("filled", default=True)


@contextlib.contextmanager
def unfilled_parameters() -> Iterator[None]:
    """Within the block new parameters of this thread hold any values: those of a model that is read right afterwards.

    To write NaN first takes a fourth of the time in which a model is loaded.
    """
    token = _filled.set(False)
    try:
        yield
    finally:
        _filled.reset(token)


def placements(module: nn.Module) -> dict[str, Placement]:
    """The placement of each parameter, by the names and in the order of ``module.named_parameters()``.

    A parameter that no tplayers layer added has no record and counts as replicated. A parameter that several
    modules share has the record of any of them. Raises ValueError, naming the parameter, if a module no longer has the
    parameter that its record describes: it is gone (parametrized or pruned), or has another shape.
    """
    recorded = _recorded(module)
    return {name: recorded.get(p) or Placement(tuple(p.shape)) for name, p in module.named_parameters()}


def whole_placements(module: nn.Module) -> dict[str, Placement]:
    """The `placements` of the whole model that ``module`` is, or is a stage of (`tplayers.Transformer.whole`)."""
    whole = getattr(module, "whole", None)
    return placements(module if whole is None else whole())


#: The attribute of a module that holds the placements of its own parameters.
_RECORDS = "parameter_placements"


def _recorded(module: nn.Module) -> dict[nn.Parameter, Placement]:
    found: dict[nn.Parameter, Placement] = {}
    for path, owner in module.named_modules():
        mine = dict(owner.named_parameters(recurse=False, remove_duplicate=False))  # tied parameters, too
        for name, placement in vars(owner).get(_RECORDS, {}).items():
            where = f"{path}.{name}".lstrip(".")
            parameter = mine.get(name)
            if parameter is None:
                raise ValueError(
                    f"{where}: has a placement and is no parameter any more; a layer of tplayers cannot be "
                    "parametrized or pruned, or lose its parameters in another way"
                )
            if tuple(parameter.shape) != placement.local_shape:
                needed = f"{list(placement.local_shape)} of {list(placement.shape)}"
                raise ValueError(f"{where}: is {list(parameter.shape)}; by its placement a rank holds {needed}")
            known = found.setdefault(parameter, placement)
            if (known, known.partial) != (placement, placement.partial):
                raise ValueError(f"{where}: is shared with a parameter that is placed otherwise: {placement}, {known}")
    return found


def initialize(module: nn.Module, seed: int) -> None:
    """Fill every placed parameter of ``module`` with its part of a global tensor drawn from (seed, global name).

    The global tensor is drawn on the CPU in float32, so all TP sizes and devices start with the same bits. It
    communicates nothing. The global name is the path in ``module``, so call it on the root module. Raises ValueError as
    `placements` does.
    """
    recorded = _recorded(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if (placement := recorded.get(parameter)) is not None:
                parameter.copy_(placement.part(placement.init.draw(placement.shape, seed, name)))


def without_partial_gradients(module: nn.Module) -> None:
    """Note that the layers of ``module`` sum their gradients themselves: no placement is `Placement.partial`."""
    for owner in module.modules():
        records = vars(owner).get(_RECORDS, {})
        records.update({name: replace(placement, partial=False) for name, placement in records.items()})


def sum_partial_gradients(module: nn.Module, comm: Communicator) -> None:
    """Sum the gradients of parameters that are `Placement.partial` over the tensor group ``comm``, in place.

    Call it after the last backward of a step, before anything reads the gradients. Every rank must call it, with
    gradients for the same parameters. (`trainers.training.reduction` does it for its buckets.)
    """
    placed = placements(module)
    partial = [p.grad for name, p in module.named_parameters() if placed[name].partial and p.grad is not None]
    all_reduce_together(partial, comm)


def all_reduce_together(tensors: Sequence[Tensor], comm: Communicator) -> None:
    """Sum each of ``tensors`` over ``comm``, in place.

    It all-reduces one buffer with copies of all tensors of a dtype. Every rank must call it with the same shapes.
    A group of one rank communicates nothing.
    """
    if comm.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        private("_foreach_copy_")(alike, sum_together(alike, comm))


def sum_together(tensors: Sequence[Tensor], comm: Communicator) -> list[Tensor]:
    """Return the sums over ``comm`` of ``tensors``, which have one dtype: one all-reduce, in one new buffer.

    Every rank must call it with the same shapes.
    """
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    comm.all_reduce(flat)
    sums = flat.split_with_sizes([tensor.numel() for tensor in tensors])
    return [total.view(one.shape) for total, one in zip(sums, tensors, strict=True)]


def require_divisible(parallel_size: int, **values: int) -> None:
    """Raise ValueError, naming the values and the TP sizes that would work, unless ``parallel_size`` divides each."""
    if all(value % parallel_size == 0 for value in values.values()):
        return
    common = math.gcd(*values.values())
    fitting = [n for n in range(1, common + 1) if common % n == 0]
    named = ", ".join(f"{name}={value}" for name, value in values.items())
    raise ValueError(
        f"tensor-model-parallel size {parallel_size} does not divide all of {named}; sizes that would work: {fitting}"
    )


def require_one_of(known: Collection[str | None], **given: str | None) -> None:
    """Raise ValueError, naming the option, unless the one that is ``given`` has one of the values ``known``."""
    for name, value in given.items():
        if value not in known:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(str, known))}")
