"""The rules for functions and methods: what they make of split fields, by their names in `names`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import names, shapes
from .calls import FieldCall, dims_of, emit_aligned, emit_results, require_shape
from .layers import replace
from .resizing import pooled, upsampled
from .traced import Traced
from .tracer import FieldTracer
from .values import Number, Value, reduced_space, shared_blocks


def call(t: FieldTracer, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Emit the parallel form of a call, or raise `Refused`."""
    name = names.name_of(kind, target)
    if name is None:
        said = args[1] if target is getattr else getattr(target, "__name__", str(target))
        where = str(getattr(target, "__module__", "")), said
        instead = names.INSTEAD.get("fft" if "fft" in "".join(map(str, where)) else said, "")
        what = "attribute" if target is getattr else "method" if kind == "call_method" else "function"
        raise t.refused(
            f"the {what} {said}", "it is not among those that are known to be right on split fields", instead
        )
    made = FieldCall(t, kind, target, name, args, kwargs)
    if not made.tensors:
        return made.emit(Number(made.whole()))
    if kwargs.get("out") is not None:
        raise made.refused("out= is in place")
    if made.in_place and (made.x is not made.tensors[0] or made.value.storage in t.frozen):
        raise made.refused(
            "it changes a parameter, a buffer or a copy in place", "the function that makes a new tensor"
        )
    if not made.fields:
        return _everywhere(made)
    for table, rule in _RULES:
        if name in table:
            if table not in _OF_ANY and not made.of(made.x):
                raise made.refused("its first tensor is one that every rank has, and another one is split")
            return rule(made)
    raise made.refused("it is not among those that are known to be right on split fields", names.INSTEAD.get(name, ""))


def _everywhere(c: FieldCall) -> Any:
    """Of tensors that every rank has: the same call."""
    if c.name.startswith("dropout") and c.argument(1, "p", 0.5) and c.argument(2, "training", True):
        raise c.refused("each rank would draw other numbers", "nn.Dropout")
    if c.name == "interpolate" and set(c.value.whole.shape[2:]) == {1}:
        whole = c.whole()  # one point everywhere: of its field a rank needs no memory
        copied = c.t.emit("call_method", "clone", (c.x,), {}, c.value)
        return c.t.emit("call_method", "expand", (copied, -1, -1, *whole.shape[2:]), {}, Value(whole))
    return emit_results(c, c.whole(), lambda one: Value(one))


def _pointwise(c: FieldCall) -> Any:
    whole = c.whole()
    values = [one.value for one in c.tensors]
    space = c.fields[0].value.space
    if c.in_place and c.value.blocks is None:
        raise c.refused("it changes a tensor that every rank has by a split one")
    if c.name in _PERHAPS_VIEWS:
        c.keep(c.value, whole)
    return emit_aligned(c, whole, shared_blocks(values, whole), space)


def _extreme_or_pointwise(c: FieldCall) -> Any:
    """torch.max and torch.min of two tensors are pointwise."""
    return _pointwise(c) if isinstance(c.argument(1, "other"), Traced) else _reducing(c)


def _along(c: FieldCall) -> Any:
    dims = dims_of(c, names.ALONG[c.name])
    if dims is None and c.name in ("glu", "normalize"):
        dims = [{"glu": -1, "normalize": 1 - c.value.whole.dim()}[c.name]]
    if dims is None or any(c.value.holds(dim) for dim in dims):
        raise c.refused("it goes along an axis of space, which ranks share", "it along channels (dim=1)")
    return c.emit_like(c.whole())


def _reducing(c: FieldCall) -> Any:
    value, dims = c.value, dims_of(c, names.REDUCING[c.name])
    dims = list(range(-value.whole.dim(), 0)) if dims in (None, []) else dims
    assert dims is not None
    whole = c.whole()
    one = whole if isinstance(whole, Tensor) else whole[0]
    keep = one.dim() == value.whole.dim()
    if not keep and one.dim() != value.whole.dim() - len(dims):
        raise c.refused("its arguments are not understood", "it with dim= and keepdim=")
    if not any(value.holds(dim) for dim in dims):
        space = reduced_space(value, dims, keep=keep)
        return emit_results(c, whole, lambda one: Value(one, value.blocks, space))
    if not set(value.space) <= set(dims) or c.name not in ("mean", "sum", "amax") or "dtype" in c.kwargs:
        raise c.refused(
            "it reduces axes of space, which ranks share",
            "mean, sum or amax over all axes of space, or nn.AdaptiveAvgPool",
        )
    mask = value.whole.dtype == torch.bool and c.name in ("sum", "amax")
    y = pooled(c.t, c.t.cast(c.x, torch.float64) if mask else c.x, "max" if c.name == "amax" else "avg")
    if c.name == "sum" and value.blocks is not None:
        y = c.t.emit("call_method", "mul", (y, value.blocks.points()), {}, y.value)
    rest = [dim for dim in dims if not value.holds(dim)]
    if rest:
        reduced = getattr(y.value.whole, c.name)(rest, keepdim=True)
        y = c.t.emit("call_method", c.name, (y, rest), {"keepdim": True}, Value(reduced))
    if mask:  # a count is a whole number, and a mean times the points is nearly one
        y = c.t.cast(c.t.emit("call_method", "round", (y,), {}, y.value), one.dtype)
    if keep:
        return y
    for dim in sorted(dim + value.whole.dim() for dim in dims)[::-1]:
        y = c.t.emit("call_method", "squeeze", (y, dim), {}, Value(y.value.whole.squeeze(dim)))
    return y


def _pools(c: FieldCall) -> Any:
    kind = getattr(nn, names.POOLS[c.name])
    options = {**dict(zip(names.PLACES[c.name[:3]], c.args[1:], strict=False)), **c.kwargs}
    try:
        layer = kind(**options)
    except TypeError as error:
        raise c.refused(str(error)) from error
    return replace(c.t, layer, c.x)


def _interpolating(c: FieldCall) -> Any:
    places = ("size", "scale_factor", "mode", "align_corners")
    y = upsampled(c.t, c.x, {"mode": "nearest", **dict(zip(places, c.args[1:], strict=False)), **c.kwargs})
    require_shape(c, y)
    return y


def _last_dimensions(c: FieldCall) -> Any:
    """F.layer_norm and F.linear work on the last dimensions."""
    last = len(c.args[1]) if c.name == "layer_norm" else 1
    if any(c.value.holds(dim) for dim in range(-last, 0)) or not c.of(c.x) or len(c.fields) > 1:
        raise c.refused("the last dimensions are axes of space, which ranks share", "it with the channels at the end")
    return c.emit_like(c.whole())


def _prelu(c: FieldCall) -> Any:
    if len(c.fields) > 1 or (c.args[1].value.whole.numel() > 1 and not c.value.is_field):
        raise c.refused("it needs [batch, channels, *space]")
    return c.emit_like(c.whole())


def _dropout(c: FieldCall) -> Any:
    if c.argument(1, "p", 0.5) and c.argument(2, "training", True):
        raise c.refused("each rank would draw other numbers", "nn.Dropout as a layer of the module")
    return c.x


#: these return their tensor or a copy, which may be another one on a block than on the field
_PERHAPS_VIEWS = frozenset(
    {"contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16", "bool", "int", "long"}
)
#: names of max and min, which are pointwise of two tensors
_EXTREMES = frozenset({"max", "min"})
#: rules for calls whose first tensor may be one that every rank has
_OF_ANY = (names.POINTWISE, names.JOINING, _EXTREMES)
_RULES: list[tuple[Any, Callable[[FieldCall], Any]]] = [
    (_EXTREMES, _extreme_or_pointwise),
    (names.POINTWISE, _pointwise),
    (names.ALONG, _along),
    (names.REDUCING, _reducing),
    (names.RESHAPING, shapes.reshaping),
    (names.PERMUTING, shapes.permuting),
    (names.SPLITTING, shapes.splitting),
    (names.JOINING, shapes.joining),
    (names.POOLS, _pools),
    (("getitem",), shapes.getitem),
    (("interpolate", "upsample"), _interpolating),
    (("pad",), shapes.padding),
    (("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle"), shapes.shuffling),
    (("layer_norm", "linear"), _last_dimensions),
    (("prelu",), _prelu),
    (("dropout", "dropout1d", "dropout2d", "dropout3d"), _dropout),
    (("roll", "flip"), shapes.moving),
]
