"""Global pooling, upsampling and padding of fields, which modules ask for by layers and by functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tplayers.fields.adaptive_pool import FieldGlobalPool
from tplayers.fields.layer import FieldLayer
from tplayers.fields.pad import FieldPad
from tplayers.fields.resample import FieldResample
from tplayers.fields.upsample import FieldUpsample

from .step import LocalStep
from .values import Value, said, shaped


def _through(t: LocalStep, name: str, options: tuple[Any, ...], x: Value, make: Callable[[], FieldLayer]) -> Value:
    """``x`` through the layer for a function ``name`` with these ``options``, which ``make`` makes."""
    try:
        layer: Any = t.program.layer(name, (x.blocks, options), make)
    except ValueError as error:
        raise t.refused(name, str(error)) from error
    whole = shaped((*x.shape[:2], *layer.output.shape), x.whole.dtype)
    return t.through(layer, x, Value(whole, layer.output, x.space))


def pooled(t: LocalStep, x: Value, mode: str, path: str = "a mean of the field") -> Value:
    """The mean or maximum of the whole field, [batch, channels, 1, ...], which every rank has."""
    if not x.is_field or x.blocks is None:
        raise t.refused("a mean of the field", f"it needs [batch, channels, *space], not {said(x)}", "permute")
    blocks = x.blocks
    layer = t.program.layer(path, (blocks, mode), lambda: FieldGlobalPool(t.grid, blocks, mode=mode))
    return t.through(layer, x, Value(shaped((*x.shape[:2], *(1 for _ in x.space)), x.whole.dtype)))


def upsampled(t: LocalStep, x: Value, options: dict[str, Any]) -> Value:
    """torch.nn.functional.interpolate with ``options``: size, scale_factor, mode, align_corners."""
    if not x.is_field or x.blocks is None:
        raise t.refused("F.interpolate", f"it needs [batch, channels, *space], not {said(x)}", "permute")
    if options.get("antialias"):
        raise t.refused("F.interpolate", "there is no antialias")
    wanted: Any = options.get("size") or options.get("scale_factor")
    blocks, here = x.blocks, x.blocks.shape
    wanted = tuple(wanted) if isinstance(wanted, (tuple, list)) else (wanted,) * len(here)
    if len(wanted) != len(here) or not all(isinstance(one, (int, float)) for one in wanted):
        raise t.refused("F.interpolate", f"size or scale_factor {wanted} does not fit a field {list(here)}")
    scales = [w / n if options.get("size") is not None else w for w, n in zip(wanted, here, strict=True)]
    whole = all(scale == int(scale) and scale >= 1 for scale in scales)
    mode, corners = options["mode"], bool(options.get("align_corners"))
    if not whole and (options.get("size") is None or mode not in ("linear", "bilinear", "trilinear")):
        raise t.refused(
            "F.interpolate", f"the scales {scales} of a field {list(here)} are not whole numbers",
            "size= with a linear mode, nn.AvgPool2d to make it smaller, or F.pad or slices for some points",
        )  # fmt: skip
    shape = tuple(int(s) * n for s, n in zip(scales, here, strict=True)) if whole else wanted
    output = t.program.blocks_of.get(shape)

    def make() -> FieldLayer:
        if whole:
            more: dict[str, Any] = {"mode": mode, "align_corners": corners, "output": output}
            return FieldUpsample(list(map(int, scales)), t.grid, blocks, **more)
        points = "corners" if corners else "cells"
        return FieldResample(t.grid, blocks, output or t.grid.decompose(shape), points)

    return _through(t, "F.interpolate", (shape, mode, corners, output), x, make)


def padded(t: LocalStep, x: Value, padding: Sequence[int], mode: str = "constant", fill: float = 0.0) -> Value:
    """``x`` with padding along its axes of space, or cropped."""
    if not x.is_field or x.blocks is None:
        raise t.refused("F.pad", f"it needs [batch, channels, *space], not {said(x)}", "permute")
    blocks = x.blocks

    def make() -> FieldLayer:
        layer = FieldPad(padding, t.grid, blocks, mode=mode, value=fill)
        wanted = t.program.blocks_of.get(layer.output.shape)
        if wanted in (None, layer.output):
            return layer
        return FieldPad(padding, t.grid, blocks, mode=mode, value=fill, output=wanted)

    return _through(t, "F.pad or a slice of space", (tuple(padding), mode, repr(fill)), x, make)
