"""The facts that a sharded module knows of a tensor: its whole shape, and how the ranks share it.

Shapes come from torch itself: each function of the module also runs on tensors without storage ("meta"), of the shapes
of the *whole* field. These tensors share storages as those of torch's program do, which shows what a function in place
would change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commengine import Decomposition


class Refused(ValueError):
    """`shard` cannot take a part of the module."""


@dataclass(frozen=True, eq=False, repr=False)
class Value:
    """A tensor of the module.

    whole: without storage, of the shape of the whole tensor. blocks: how the ranks share it; None: every rank has all
    of it. space: the dimensions that are split, in the order of the field's axes, counted from the end (negative).
    index: which tensor of a `LocalStep` it is.
    """

    whole: Tensor
    blocks: Decomposition | None = None
    space: tuple[int, ...] = ()
    index: int = -1

    def __repr__(self) -> str:
        return f"%{self.index}"

    @property
    def shape(self) -> torch.Size:
        return self.whole.shape

    @property
    def is_field(self) -> bool:
        """Whether it is [batch, channels, *space], split over the ranks."""
        return self.blocks is not None and self.at_end and self.whole.dim() == 2 + len(self.space)

    @property
    def at_end(self) -> bool:
        """Whether the axes of space are the last dimensions."""
        return self.space == tuple(range(-len(self.space), 0))

    def holds(self, dim: int) -> bool:
        """Whether ``dim``, of any sign, is an axis of space."""
        return (dim if dim < 0 else dim - self.whole.dim()) in self.space


def storage_of(whole: Tensor) -> int:
    """The same number for tensors of torch's program that share memory."""
    return int(whole.untyped_storage()._cdata)


def shaped(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor without storage."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def rebuilt(one: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """The arguments ``one`` with ``function`` of each that is of a ``kind``."""
    if isinstance(one, kind):
        return function(one)
    if isinstance(one, (tuple, list)):
        return (list if isinstance(one, list) else tuple)([rebuilt(each, kind, function) for each in one])
    if isinstance(one, dict):
        return {name: rebuilt(each, kind, function) for name, each in one.items()}
    if isinstance(one, slice):
        return slice(*rebuilt((one.start, one.stop, one.step), kind, function))
    return one


def shape_text(shape: Sequence[int], batch: int) -> str:
    """A shape for an error; its first size is the batch if it is ``batch``."""
    return f"[{', '.join('batch' if not dim and size == batch else str(size) for dim, size in enumerate(shape))}]"


def said(value: Value) -> str:
    """Shape and blocks for an error."""
    ways = f" in the blocks {value.blocks.blocks}" if value.blocks else " on every rank"
    return shape_text(value.shape, value.shape[0] if value.shape else 0) + ways


def reshaped_space(value: Value, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Where the axes of space are after a reshape to ``shape``; None if it mixes points with other dimensions.

    A dimension stays as it is in a reshape if it has the same size and as many elements before it.
    """
    before, found, start = list(value.shape), [], 0
    for dim in sorted(value.space):
        size, ahead = before[dim], math.prod(before[:dim])
        places = [p for p in range(start, len(shape)) if shape[p] == size and math.prod(shape[:p]) == ahead]
        if not places:
            return None
        found.append(places[0] - len(shape))
        start = places[0] + 1
    return tuple(found)


def permuted_space(value: Value, order: Sequence[int]) -> tuple[int, ...] | None:
    """Where the axes of space are after a permutation to ``order``; None if they change their order."""
    dims = value.whole.dim()
    found = tuple(list(order).index(dim + dims) - dims for dim in value.space)
    return found if list(found) == sorted(found) else None


def reduced_space(value: Value, dims: Sequence[int], *, keep: bool) -> tuple[int, ...]:
    """Where the axes of space are after other dimensions, ``dims`` (negative), were reduced."""
    return value.space if keep else tuple(dim + sum(gone > dim for gone in dims) for dim in value.space)


def shared_blocks(values: Sequence[Value], whole: Tensor) -> Decomposition:
    """The blocks of a result ``whole`` of ``values`` that are broadcast: those of the first one that has its points."""
    split = [(one, one.blocks) for one in values if one.blocks is not None]
    axes = []
    for axis, dim in enumerate(split[0][0].space):
        full = [blocks.blocks[axis] for one, blocks in split if one.shape[dim] == whole.shape[dim]]
        axes.append(full[0])
    return Decomposition(tuple(axes))
