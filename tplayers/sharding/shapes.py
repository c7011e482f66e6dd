"""The rules for functions that change shapes: reshapes, permutations, parts, joins, slices, paddings, shuffles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from commengine import Decomposition
from tplayers.movement.halo import flip, roll

from . import names
from .calls import FieldCall, dims_of, emit_aligned, emit_results, require_shape
from .layers import replace
from .resizing import padded
from .values import Value, permuted_space, reduced_space, reshaped_space, shape_text, shaped, shared_blocks

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23)


def reshaping(c: FieldCall) -> Any:
    """A reshape must keep the batch and the axes of space as they are."""
    x, whole = c.x, c.whole()
    space = reshaped_space(x, whole.shape)
    if c.name == "squeeze" and dims_of(c, 1) is None:
        raise c.refused("without dim it would drop a batch of one sample, too", "squeeze(dim)")
    if whole.dtype != x.whole.dtype:
        raise c.refused("it takes the bytes for numbers of another dtype", "to(dtype)")
    if space is None or x.blocks is None or whole.shape[0] != x.shape[0]:
        sizes = " to ".join(shape_text(shape, x.shape[0]) for shape in (x.shape, whole.shape))
        instead = "a mean over space (nn.AdaptiveAvgPool2d(1)) before it, or tplayers.FieldAttention"
        why = f"from {sizes} it mixes points, channels or samples, and ranks share the points"
        raise c.refused(why, instead)
    c.t.frozen += (x.whole, whole)
    local = list(whole.shape)
    for dim, size in zip(space, x.blocks.local_shape(c.t.grid.coords), strict=True):
        local[dim] = size
    return c.t.emit(Tensor.reshape, (x, local), {}, Value(whole, x.blocks, space), f"reshape({x}, {[*whole.shape]})")


def permuting(c: FieldCall) -> Any:
    """A permutation must keep the order of the axes of space."""
    whole, probe = c.whole(), shaped(_PRIMES[: c.x.whole.dim()], torch.float32)
    moved = c.function(probe, *c.args[1:], **c.kwargs).shape
    space = permuted_space(c.x, [_PRIMES.index(size) for size in moved])
    if space is None:
        raise c.refused("it changes the order of the axes of space", "the axes in the order of the field")
    return c.emit(Value(whole, c.x.blocks, space))


def splitting(c: FieldCall) -> Any:
    """Parts along channels."""
    dims = dims_of(c, names.SPLITTING[c.name]) or [-c.x.whole.dim()]
    if c.x.holds(dims[0]) or dims[0] == -c.x.whole.dim():
        raise c.refused("it splits the batch or an axis of space", "it along channels (dim=1), or a slice")
    space = reduced_space(c.x, dims, keep=c.name != "unbind")
    return emit_results(c, c.whole(), lambda one: Value(one, c.x.blocks, space))


def joining(c: FieldCall) -> Any:
    """torch.cat along channels."""
    whole, tensors = c.whole(), c.argument(0, "tensors")
    dim = c.argument(1, "dim", c.kwargs.get("axis", 0)) % whole.dim() - whole.dim()
    space = c.fields[0].space
    if dim in space or dim == -whole.dim():
        raise c.refused("it goes along the batch or an axis of space", "it along channels (dim=1)")
    if any(one.whole.dim() != whole.dim() for one in tensors):
        raise c.refused("its tensors have different numbers of dimensions")
    return emit_aligned(c, whole, shared_blocks(tensors, whole), space)


def getitem(c: FieldCall) -> Any:
    """Slices along space are crops and strides; of other dimensions an index takes what it takes."""
    x, index = c.x, c.args[1] if isinstance(c.args[1], tuple) else (c.args[1],)
    for item in index:
        if not (item is None or item is Ellipsis or isinstance(item, (int, slice))) or isinstance(item, bool):
            raise c.refused("an index must be numbers and slices")
    named = sum(item is not None and item is not Ellipsis for item in index)
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    full = (*index[:at], *[slice(None)] * (x.whole.dim() - named), *index[at + 1 :])
    whole, dim, space, cuts = c.whole(), 0, [], {}
    kept: list[Any] = []
    result = sum(not isinstance(item, int) for item in full)
    for item in full:
        if item is not None and dim == 0 and item != slice(None):
            raise c.refused("it takes a part of the batch")
        if item is not None and x.holds(dim):
            if not isinstance(item, slice):
                raise c.refused("it takes one point of an axis of space, which ranks share", "a slice")
            size = int(x.shape[dim])
            if item.indices(size) != (0, size, 1):
                cuts[dim - x.whole.dim()] = item.indices(size)
            item = slice(None)
            space.append(sum(not isinstance(one, int) for one in kept) - result)
        kept.append(item)
        dim += item is not None
    y = x
    if cuts:
        c.t.frozen += (x.whole, whole)
        y = _cropped(c, cuts)
    if all(item == slice(None) for item in kept):
        return y if cuts else c.emit_like(whole)
    return c.t.emit(c.function, (y, tuple(kept)), {}, Value(whole, y.blocks, tuple(space)))


def _cropped(c: FieldCall, cuts: dict[int, tuple[int, int, int]]) -> Value:
    """The points [start, stop) of each axis in ``cuts``, and of them each one of a step."""
    axes = len(c.x.space)
    padding, steps = [0] * (2 * axes), [1] * axes
    for dim, (start, stop, step) in cuts.items():
        if stop <= start:
            raise c.refused("it leaves no points")
        padding[-2 * dim - 2 : -2 * dim] = [-start, stop - int(c.x.shape[dim])]
        steps[axes + dim] = step
    y = padded(c.t, c.x, padding) if any(padding) else c.x
    if max(steps) > 1:
        pool = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}[axes]
        y = replace(c.t, pool, {"kernel_size": 1, "stride": tuple(steps)}, y)
    c.t.frozen.append(y.whole)
    return y


def padding(c: FieldCall) -> Any:
    """torch.nn.functional.pad: along axes of space by a layer, along channels by torch."""
    padding = list(c.argument(1, "pad"))
    mode, fill, axes = c.argument(2, "mode", "constant"), c.argument(3, "value", 0.0) or 0.0, len(c.x.space)
    if any(not isinstance(one, int) for one in padding):
        raise c.refused("its padding must be numbers")
    y, inner, outer = c.x, padding[: 2 * axes], padding[2 * axes :]
    if not c.x.at_end:
        raise c.refused("it needs the axes of space at the end", "permute before it")
    if any(inner):
        y = padded(c.t, y, inner, mode, fill)
    if any(outer[2:]) or (any(outer) and mode != "constant"):
        raise c.refused("it pads the batch")
    if any(outer):
        more = ([0] * 2 * axes + outer, mode, fill)
        whole = torch.nn.functional.pad(y.whole, *more)
        y = c.t.emit(c.function, (y, *more), {}, Value(whole, y.blocks, y.space))
    require_shape(c, y)
    return c.t.emit(Tensor.clone, (y,), {}, Value(c.whole(), y.blocks, y.space)) if y is c.x else y


def shuffling(c: FieldCall) -> Any:
    """PixelShuffle moves channels into the points beside them: on a block it is what it is on the field."""
    if not c.x.is_field or c.x.blocks is None:
        raise c.refused("it needs [batch, channels, *space]", "permute before it")
    whole, x, blocks = c.whole(), c.x, c.x.blocks
    if "channel" in c.name:
        return c.emit_like(whole)
    if c.name == "pixel_shuffle":
        made = _larger(blocks, c.argument(1, "upscale_factor"))
    else:
        factor = c.argument(1, "downscale_factor")
        made = Decomposition(tuple(tuple(size // factor for size in sizes) for sizes in blocks.blocks))
        if _larger(made, factor) != blocks:
            made = Decomposition.even([n // factor for n in blocks.shape], blocks.grid_shape)
            x = c.t.cut(x, _larger(made, factor), x.space, x.whole)
    c.t.program.blocks_of.setdefault(made.shape, made)
    return c.emit(Value(whole, made, c.x.space), (x, *c.args[1:]))


def _larger(blocks: Decomposition, factor: int) -> Decomposition:
    return Decomposition(tuple(tuple(size * factor for size in sizes) for sizes in blocks.blocks))


def moving(c: FieldCall) -> Any:
    """torch.roll and torch.flip along axes of space."""
    x = c.x
    given = dims_of(c, 2 if c.name == "roll" else 1, "dims")
    shifts = c.argument(1, "shifts") if c.name == "roll" else None
    if given is None or x.blocks is None:
        raise c.refused("it moves points between the rows of the field", "it with dims")
    if not any(x.holds(dim) for dim in given):
        return c.emit_like(c.whole())
    if not x.at_end or not all(x.holds(dim) for dim in given):
        raise c.refused("it moves channels and points at once", "a call for each")
    axes, grid = tuple(dim + len(x.space) for dim in given), c.t.grid
    value, options = Value(c.whole(), x.blocks, x.space), {"decomposition": x.blocks}
    if shifts is None:
        return c.t.emit(flip, (x, grid, axes), options, value, f"flip({x}, {axes}, {x.blocks.blocks})")
    moves = tuple(shifts if isinstance(shifts, (tuple, list)) else [shifts])
    return c.t.emit(roll, (x, grid, moves, axes), options, value, f"roll({x}, {moves}, {axes}, {x.blocks.blocks})")
