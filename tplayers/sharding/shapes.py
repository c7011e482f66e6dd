"""The rules for functions that change shapes: reshapes, permutations, parts, joins, slices, paddings, shuffles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from commengine import Decomposition

from . import names
from .calls import FieldCall, dims_of, emit_aligned, emit_results, require_shape
from .layers import replace
from .parts import Moved, Reshaped
from .resizing import padded
from .traced import Traced
from .values import BATCH, Value, permuted_space, reduced_space, reshaped_space, shared_blocks, traced

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23)


def reshaping(c: FieldCall) -> Any:
    """A reshape must keep the batch and the axes of space as they are."""
    value, whole = c.value, c.whole()
    space = reshaped_space(value, whole.shape)
    if c.name == "squeeze" and dims_of(c, 1) is None:
        raise c.refused("without dim it would drop a batch of one sample, too", "squeeze(dim)")
    if whole.dtype != value.whole.dtype:
        raise c.refused("it takes the bytes for numbers of another dtype", "to(dtype)")
    batches = [size for size in whole.shape if size % BATCH == 0]
    if space is None or batches != [BATCH] or value.whole.shape[0] != BATCH or whole.shape[0] != BATCH:
        raise c.refused(
            f"from {_sizes(value.whole.shape)} to {_sizes(whole.shape)} it mixes points, channels or samples, and "
            "ranks share the points",
            "a mean over space (nn.AdaptiveAvgPool2d(1)) before it, or tplayers.FieldAttention",
        )  # fmt: skip
    assert value.blocks is not None
    c.keep(value, whole)
    shape: list[int | None] = [None, *map(int, whole.shape[1:])]
    return c.t.through(Reshaped(c.t.grid, value.blocks, space, shape), c.x, Value(whole, value.blocks, space))


def _sizes(shape: Sequence[int]) -> str:
    return f"[{', '.join('batch' if size == BATCH else str(size) for size in shape)}]"


def permuting(c: FieldCall) -> Any:
    """A permutation must keep the order of the axes of space."""
    dims = c.value.whole.dim()
    probe = traced(_PRIMES[:dims], torch.float32)
    moved = FieldCall(c.t, c.kind, c.target, c.name, (probe, *c.args[1:]), c.kwargs).whole()
    space = permuted_space(c.value, [_PRIMES.index(size) for size in moved.shape])
    if space is None:
        raise c.refused("it changes the order of the axes of space", "the axes in the order of the field")
    return c.emit(Value(c.whole(), c.value.blocks, space))


def splitting(c: FieldCall) -> Any:
    """Parts along channels."""
    dims = dims_of(c, names.SPLITTING[c.name]) or [-c.value.whole.dim()]
    if c.value.holds(dims[0]) or dims[0] == -c.value.whole.dim():
        raise c.refused("it splits the batch or an axis of space", "it along channels (dim=1), or a slice")
    space = reduced_space(c.value, dims, keep=c.name != "unbind")
    return emit_results(c, c.whole(), lambda one: Value(one, c.value.blocks, space))


def joining(c: FieldCall) -> Any:
    """torch.cat along channels."""
    whole, tensors = c.whole(), c.argument(0, "tensors")
    dim = c.argument(1, "dim", c.kwargs.get("axis", 0)) % whole.dim() - whole.dim()
    space = c.fields[0].value.space
    if dim in space or dim == -whole.dim():
        raise c.refused("it goes along the batch or an axis of space", "it along channels (dim=1)")
    if any(one.value.whole.dim() != whole.dim() for one in tensors):
        raise c.refused("its tensors have different numbers of dimensions")
    return emit_aligned(c, whole, shared_blocks([one.value for one in tensors], whole), space)


def getitem(c: FieldCall) -> Any:
    """Slices along space are crops and strides; of other dimensions an index takes what it takes."""
    value, index = c.value, c.args[1] if isinstance(c.args[1], tuple) else (c.args[1],)
    for item in index:
        if not (item is None or item is Ellipsis or isinstance(item, (int, slice))) or isinstance(item, bool):
            raise c.refused("an index must be numbers and slices")
    named = sum(item is not None and item is not Ellipsis for item in index)
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    full = (*index[:at], *[slice(None)] * (value.whole.dim() - named), *index[at + 1 :])
    whole, dim, space, cuts = c.whole(), 0, [], {}
    kept: list[Any] = []
    result = sum(not isinstance(item, int) for item in full)
    for item in full:
        if item is not None and dim == 0 and item != slice(None):
            raise c.refused("it takes a part of the batch")
        if item is not None and value.holds(dim):
            size = int(value.whole.shape[dim])
            if not isinstance(item, slice) or any(
                isinstance(one, Traced) for one in (item.start, item.stop, item.step)
            ):
                raise c.refused("it takes one point of an axis of space, which ranks share", "a slice")
            if item.indices(size) != (0, size, 1):
                cuts[dim - value.whole.dim()] = item.indices(size)
            item = slice(None)
            space.append(sum(not isinstance(one, int) for one in kept) - result)
        kept.append(item)
        dim += item is not None
    y = c.x
    if cuts:
        c.keep(value, whole)
        y = _cropped(c, cuts)
    if all(item == slice(None) for item in kept):
        return y if cuts else c.emit_like(whole)
    return c.t.emit(c.kind, c.target, (y, tuple(kept)), {}, Value(whole, y.value.blocks, tuple(space)))


def _cropped(c: FieldCall, cuts: dict[int, tuple[int, int, int]]) -> Traced:
    """The points [start, stop) of each axis in ``cuts``, and of them each one of a step."""
    axes = len(c.value.space)
    padding, steps = [0] * (2 * axes), [1] * axes
    for dim, (start, stop, step) in cuts.items():
        size = int(c.value.whole.shape[dim])
        if stop <= start:
            raise c.refused("it leaves no points")
        padding[-2 * dim - 2 : -2 * dim] = [-start, stop - size]
        steps[axes + dim] = step
    y = padded(c.t, c.x, padding) if any(padding) else c.x
    if max(steps) > 1:
        y = replace(c.t, {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}[axes](1, stride=tuple(steps)), y)
    c.keep(y.value, y.value.whole)
    return y


def padding(c: FieldCall) -> Any:
    """torch.nn.functional.pad: along axes of space by a layer, along channels by torch."""
    padding = list(c.argument(1, "pad"))
    mode, fill, axes = c.argument(2, "mode", "constant"), c.argument(3, "value", 0.0) or 0.0, len(c.value.space)
    if any(not isinstance(one, int) for one in padding):
        raise c.refused("its padding must be numbers")
    y, inner, outer = c.x, padding[: 2 * axes], padding[2 * axes :]
    if not c.value.at_end:
        raise c.refused("it needs the axes of space at the end", "permute before it")
    if any(inner):
        y = padded(c.t, y, inner, mode, fill)
    if any(outer[2:]) or (any(outer) and mode != "constant"):
        raise c.refused("it pads the batch")
    if any(outer):
        whole = torch.nn.functional.pad(y.value.whole, [0] * 2 * axes + outer, mode, fill)
        args = (y, [0] * 2 * axes + outer, mode, fill)
        y = c.t.emit("call_function", c.target, args, {}, Value(whole, y.value.blocks, y.value.space))
    require_shape(c, y)
    return (
        c.t.emit("call_method", "clone", (y,), {}, Value(c.whole(), y.value.blocks, y.value.space)) if y is c.x else y
    )


def shuffling(c: FieldCall) -> Any:
    """PixelShuffle moves channels into the points beside them: on a block it is what it is on the field."""
    if not c.value.is_field or c.value.blocks is None:
        raise c.refused("it needs [batch, channels, *space]", "permute before it")
    whole, x, blocks = c.whole(), c.x, c.value.blocks
    factor = c.argument(1, "downscale_factor" if c.name == "pixel_unshuffle" else "upscale_factor")
    if "channel" in c.name:
        return c.emit_like(whole)
    if c.name == "pixel_unshuffle":
        if any(size % factor for sizes in blocks.blocks for size in sizes):
            cells = Decomposition.even([n // factor for n in blocks.shape], blocks.grid_shape)
            target = Decomposition(tuple(tuple(size * factor for size in sizes) for sizes in cells.blocks))
            x = c.t.cut(x, target, c.value.space, c.value.whole)
            blocks = target
        made = Decomposition(tuple(tuple(size // factor for size in sizes) for sizes in blocks.blocks))
    else:
        made = Decomposition(tuple(tuple(size * factor for size in sizes) for sizes in blocks.blocks))
    c.t.blocks_of.setdefault(made.shape, made)
    return c.emit(Value(whole, made, c.value.space), (x, *c.args[1:]))


def moving(c: FieldCall) -> Any:
    """torch.roll and torch.flip along axes of space."""
    value, blocks = c.value, c.value.blocks
    given = dims_of(c, 2 if c.name == "roll" else 1, "dims")
    shifts = c.argument(1, "shifts") if c.name == "roll" else None
    if given is None or blocks is None:
        raise c.refused("it moves points between the rows of the field", "it with dims")
    if not any(value.holds(dim) for dim in given):
        return c.emit_like(c.whole())
    if not value.at_end or not all(value.holds(dim) for dim in given):
        raise c.refused("it moves channels and points at once", "a call for each")
    moves = None if shifts is None else tuple(shifts if isinstance(shifts, (tuple, list)) else [shifts])
    axes = tuple(dim + len(value.space) for dim in given)
    return c.t.through(Moved(c.t.grid, blocks, axes, moves), c.x, Value(c.whole(), blocks, value.space))
