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
from .step import IN_PLACE, LocalStep
from .values import Value, reduced_space, shared_blocks


def call(t: LocalStep, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Emit what a call of ``function`` becomes, or raise `Refused`."""
    said = function.__name__
    attribute = function.__self__.__name__ if said in ("__get__", "__set__") else ""
    if said == "__set__":
        raise t.refused(f"an assignment to the attribute {attribute}", "it is of this rank's block alone")
    if (attribute or said) in names.ANSWERED:
        return function(args[0].whole, *args[1:], **kwargs)
    if attribute:
        raise t.program.unknown(f"the attribute {attribute}")
    if said in names.REFUSED:
        raise t.refused(*names.REFUSED[said])
    name = names.name_of(function)
    c = FieldCall(t, function, name or "", args, kwargs)
    if name is None:
        raise t.program.unknown(c.title, names.INSTEAD.get("fft" if "fft" in said else said, ""))
    if kwargs.get("out") is not None:
        raise c.refused("out= is in place")
    if c.in_place:
        t.writes = c.title
        if c.x is not t.given[0] or 0 in t.constants:
            raise c.refused(*IN_PLACE)
        if name in names.RESHAPING | names.PERMUTING:
            t.reshapes, c.function = True, getattr(Tensor, name)
    if name.startswith("dropout"):
        if c.argument(1, "p", 0.5) and c.argument(2, "training", True):
            raise c.refused("each rank would draw other numbers", "nn.Dropout as a layer of the module")
        return c.x
    if not c.fields:
        return _everywhere(c)
    for table, rule in _RULES:
        if name in table:
            if table not in _OF_ANY and c.x not in c.fields:
                raise c.refused("its first tensor is one that every rank has, and another one is split")
            return rule(c)
    raise t.program.unknown(c.title, names.INSTEAD.get(name, ""))


def _everywhere(c: FieldCall) -> Any:
    """Of tensors that every rank has: the same call."""
    whole = c.whole()
    if c.name == "interpolate" and set(c.x.shape[2:]) == {1}:
        # One point everywhere: of its field a rank needs no memory.
        copied = c.t.emit(Tensor.clone, (c.x,), {}, c.x)
        return c.t.emit(Tensor.expand, (copied, *whole.shape), {}, Value(whole))
    return emit_results(c, whole, Value)


def _pointwise(c: FieldCall) -> Any:
    whole = c.whole()
    if c.in_place and c.x.blocks is None:
        raise c.refused("it changes a tensor that every rank has by a split one")
    if c.name in _PERHAPS_VIEWS:
        c.t.frozen += (c.x.whole, whole)
    return emit_aligned(c, whole, shared_blocks(c.t.given, whole), c.fields[0].space)


def _along(c: FieldCall) -> Any:
    dims = dims_of(c, names.ALONG[c.name])
    if dims is None and c.name in ("glu", "normalize"):
        dims = [{"glu": -1, "normalize": 1 - c.x.whole.dim()}[c.name]]
    if dims is None or any(c.x.holds(dim) for dim in dims):
        raise c.refused("it goes along an axis of space, which ranks share", "it along channels (dim=1)")
    return c.emit_like(c.whole())


def _reducing(c: FieldCall) -> Any:
    x, dims = c.x, dims_of(c, names.REDUCING[c.name])
    dims = list(range(-x.whole.dim(), 0)) if dims in (None, []) else dims
    assert dims is not None
    whole = c.whole()
    one = whole if isinstance(whole, Tensor) else whole[0]
    keep = one.dim() == x.whole.dim()
    if not keep and one.dim() != x.whole.dim() - len(dims):
        raise c.refused("its arguments are not understood", "it with dim= and keepdim=")
    if not any(x.holds(dim) for dim in dims):
        space = reduced_space(x, dims, keep=keep)
        return emit_results(c, whole, lambda one: Value(one, x.blocks, space))
    if not set(x.space) <= set(dims) or c.name not in ("mean", "sum", "amax") or "dtype" in c.kwargs:
        instead = "mean, sum or amax over all axes of space, or nn.AdaptiveAvgPool"
        raise c.refused("it reduces axes of space, which ranks share", instead)
    mask = x.whole.dtype == torch.bool and c.name in ("sum", "amax")
    y = pooled(c.t, c.t.cast(x, torch.float64) if mask else x, "max" if c.name == "amax" else "avg")
    if c.name == "sum" and x.blocks is not None:
        y = c.t.emit(Tensor.mul, (y, x.blocks.points()), {}, y)
    rest = [dim for dim in dims if not x.holds(dim)]
    if rest:
        reduce = getattr(Tensor, c.name)
        y = c.t.emit(reduce, (y, rest), {"keepdim": True}, Value(reduce(y.whole, rest, keepdim=True)))
    if mask:  # a count is a whole number, and a mean times the points is nearly one
        y = c.t.cast(c.t.emit(Tensor.round, (y,), {}, y), one.dtype)
    for dim in [] if keep else sorted(dim + x.whole.dim() for dim in dims)[::-1]:
        y = c.t.emit(Tensor.squeeze, (y, dim), {}, Value(y.whole.squeeze(dim)))
    return y


def _pools(c: FieldCall) -> Any:
    options = {**dict(zip(names.PLACES[c.name[:3]], c.args[1:], strict=False)), **c.kwargs}
    try:
        return replace(c.t, getattr(nn, names.POOLS[c.name]), options, c.x)
    except TypeError as error:
        raise c.refused(str(error)) from error


def _interpolating(c: FieldCall) -> Any:
    places = ("size", "scale_factor", "mode", "align_corners")
    y = upsampled(c.t, c.x, {"mode": "nearest", **dict(zip(places, c.args[1:], strict=False)), **c.kwargs})
    require_shape(c, y)
    return y


def _last_dimensions(c: FieldCall) -> Any:
    """F.layer_norm and F.linear work on the last dimensions."""
    last = len(c.args[1]) if c.name == "layer_norm" else 1
    if any(c.x.holds(dim) for dim in range(-last, 0)) or len(c.fields) > 1:
        raise c.refused("the last dimensions are axes of space, which ranks share", "it with the channels at the end")
    return c.emit_like(c.whole())


def _prelu(c: FieldCall) -> Any:
    if len(c.fields) > 1 or (c.args[1].whole.numel() > 1 and not c.x.is_field):
        raise c.refused("it needs [batch, channels, *space]")
    return c.emit_like(c.whole())


#: these return their tensor or a copy, which may be another one on a block than on the field
_PERHAPS_VIEWS = frozenset(
    {"contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16", "bool", "int", "long"}
)
#: names of max and min, which are pointwise of two tensors
_EXTREMES = frozenset({"max", "min"})
#: rules for calls whose first tensor may be one that every rank has
_OF_ANY = (names.POINTWISE, names.JOINING, _EXTREMES)
_RULES: list[tuple[Any, Callable[[FieldCall], Any]]] = [
    (_EXTREMES, lambda c: (_pointwise if isinstance(c.argument(1, "other"), Value) else _reducing)(c)),
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
    (("roll", "flip"), shapes.moving),
]
