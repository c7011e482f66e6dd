"""Global pooling, upsampling and padding of fields, which modules ask for by layers and by functions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from tplayers.fields.adaptive_pool import FieldGlobalPool
from tplayers.fields.layer import FieldLayer
from tplayers.fields.pad import FieldPad
from tplayers.fields.resample import FieldResample
from tplayers.fields.upsample import FieldUpsample

from .traced import Traced
from .tracer import FieldTracer
from .values import BATCH, Value, traced


def said(value: Value) -> str:
    """Shape and blocks for an error."""
    shape = ["batch" if size == BATCH else str(size) for size in value.whole.shape]
    return f"[{', '.join(shape)}]" + (f" in the blocks {value.blocks.blocks}" if value.blocks else " on every rank")


def _kept_channels(layer: FieldLayer, value: Value) -> Value:
    whole = traced((*value.whole.shape[:2], *layer.output.shape), value.whole.dtype)
    return Value(whole, layer.output, value.space)


def of_output_size(t: FieldTracer, m: Any, path: str, value: Value, size: Any) -> nn.Module:
    """The transposed convolution ``m`` with the output_padding for an output of ``size``: its last numbers count."""
    wanted = tuple(size)[-len(m.kernel_size) :] if isinstance(size, (tuple, list)) else (size,)
    made = value.whole.shape[-len(m.kernel_size) :]
    each = zip(wanted, made, m.kernel_size, m.stride, m.padding, m.dilation, strict=True)
    sized = copy.copy(m)
    sized.output_padding = tuple(w - (n - 1) * s + 2 * p - d * (k - 1) - 1 for w, n, k, s, p, d in each)
    before = t.layers.get(path)
    if min(sized.output_padding) < 0 or (isinstance(before, FieldLayer) and before.output.shape != wanted):
        raise t.refused(f"nn.{type(m).__name__}", f"output_size={wanted} does not fit, or differs from another call's")
    return sized  # type: ignore[no-any-return]


def pooled(t: FieldTracer, x: Traced, mode: str, path: str | None = None) -> Traced:
    """The mean or maximum of the whole field, [batch, channels, 1, ...], which every rank has."""
    value: Value = x.value
    if not value.is_field or value.blocks is None:
        raise t.refused("a mean of the field", f"it needs [batch, channels, *space], not {said(value)}", "permute")
    whole = traced((*value.whole.shape[:2], *(1 for _ in value.space)), value.whole.dtype)
    return t.through(FieldGlobalPool(t.grid, value.blocks, mode=mode), x, Value(whole), path)


def upsampled(t: FieldTracer, x: Traced, options: dict[str, Any]) -> Traced:
    """torch.nn.functional.interpolate with ``options``: size, scale_factor, mode, align_corners."""
    value: Value = x.value
    if not value.is_field or value.blocks is None:
        raise t.refused("F.interpolate", f"it needs [batch, channels, *space], not {said(value)}", "permute")
    if options.get("antialias"):
        raise t.refused("F.interpolate", "there is no antialias")
    wanted: Any = options.get("size") or options.get("scale_factor")
    here = value.blocks.shape
    wanted = tuple(wanted) if isinstance(wanted, (tuple, list)) else (wanted,) * len(here)
    if len(wanted) != len(here) or not all(isinstance(one, (int, float)) for one in wanted):
        raise t.refused("F.interpolate", f"size or scale_factor {wanted} does not fit a field {list(here)}")
    scales = [w / n if options.get("size") is not None else w for w, n in zip(wanted, here, strict=True)]
    whole = all(scale == int(scale) and scale >= 1 for scale in scales)
    if not whole and (options.get("size") is None or options["mode"] not in ("linear", "bilinear", "trilinear")):
        raise t.refused(
            "F.interpolate", f"the scales {scales} of a field {list(here)} are not whole numbers",
            "size= with a linear mode, nn.AvgPool2d to make it smaller, or F.pad or slices for some points",
        )  # fmt: skip
    corners = bool(options.get("align_corners"))
    shape = tuple(int(s) * n for s, n in zip(scales, here, strict=True)) if whole else wanted
    output = t.blocks_of.get(shape)
    layer: FieldLayer
    try:
        if whole:
            more: dict[str, Any] = {"mode": options["mode"], "align_corners": corners, "output": output}
            layer = FieldUpsample(list(map(int, scales)), t.grid, value.blocks, **more)
        else:
            output = output or t.grid.decompose(shape)
            layer = FieldResample(t.grid, value.blocks, output, "corners" if corners else "cells")
    except ValueError as error:
        raise t.refused("F.interpolate", str(error)) from error
    return t.through(layer, x, _kept_channels(layer, value))


def padded(t: FieldTracer, x: Traced, padding: Sequence[int], mode: str = "constant", fill: float = 0.0) -> Traced:
    """``x`` with padding along its axes of space, or cropped."""
    value: Value = x.value
    if not value.is_field or value.blocks is None:
        raise t.refused("F.pad", f"it needs [batch, channels, *space], not {said(value)}", "permute")
    try:
        layer = FieldPad(padding, t.grid, value.blocks, mode=mode, value=fill)
        wanted = t.blocks_of.get(layer.output.shape)
        if wanted not in (None, layer.output):
            layer = FieldPad(padding, t.grid, value.blocks, mode=mode, value=fill, output=wanted)
    except ValueError as error:
        raise t.refused("F.pad or a slice of space", str(error)) from error
    return t.through(layer, x, _kept_channels(layer, value))
