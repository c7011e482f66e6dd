"""The rules for layers: which layer of fields takes the place of which layer of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from commengine import CartesianGrid, Decomposition
from tplayers.fields.adaptive_pool import FieldAdaptiveAvgPool, FieldAdaptiveMaxPool, FieldGlobalPool
from tplayers.fields.conv import FieldConv, FieldConvTranspose
from tplayers.fields.dropout import FieldDropout
from tplayers.fields.layer import FieldLayer
from tplayers.fields.norm import FieldBatchNorm, FieldGroupNorm, FieldInstanceNorm, FieldLayerNorm
from tplayers.fields.pad import FieldPad
from tplayers.fields.pool import FieldAvgPool, FieldMaxPool
from tplayers.fields.spectral import SpectralConv

from .parts import PointLayer, SharedDropout, meta_of
from .resizing import of_output_size, pooled, said
from .traced import Traced
from .tracer import FieldTracer, LayerRule
from .values import Value, traced

#: makes a layer: (torch's layer, grid, blocks of the input, {"output": blocks} or {})
Maker = Callable[[Any, CartesianGrid, Decomposition, dict[str, Any]], FieldLayer]


def _conv(m: Any, grid: CartesianGrid, d: Decomposition, more: dict[str, Any]) -> FieldLayer:
    options = {"stride": m.stride, "padding": m.padding, "dilation": m.dilation, "groups": m.groups, "output": None}
    options |= {"bias": m.bias is not None, "padding_mode": m.padding_mode, "dtype": m.weight.dtype, **more}
    return FieldConv(m.in_channels, m.out_channels, m.kernel_size, grid, d, **options)


def _conv_transpose(m: Any, grid: CartesianGrid, d: Decomposition, more: dict[str, Any]) -> FieldLayer:
    options = {"stride": m.stride, "padding": m.padding, "dilation": m.dilation, "groups": m.groups}
    options |= {"output_padding": m.output_padding, "bias": m.bias is not None, "dtype": m.weight.dtype, **more}
    return FieldConvTranspose(m.in_channels, m.out_channels, m.kernel_size, grid, d, **options)


def _max_pool(m: Any, grid: CartesianGrid, d: Decomposition, more: dict[str, Any]) -> FieldLayer:
    options = {"stride": m.stride, "padding": m.padding, "dilation": m.dilation, "ceil_mode": m.ceil_mode, **more}
    return FieldMaxPool(m.kernel_size, grid, d, **options)


def _avg_pool(m: Any, grid: CartesianGrid, d: Decomposition, more: dict[str, Any]) -> FieldLayer:
    if getattr(m, "divisor_override", None) is not None:
        raise ValueError("there is no divisor_override")
    options = {"stride": m.stride, "padding": m.padding, "ceil_mode": m.ceil_mode, **more}
    return FieldAvgPool(m.kernel_size, grid, d, count_include_pad=m.count_include_pad, **options)


def _dtype(m: nn.Module) -> torch.dtype | None:
    return next((one.dtype for one in (*m.parameters(), *m.buffers()) if one.is_floating_point()), None)


def _running(kind: Any) -> Maker:
    def make(m: Any, grid: CartesianGrid, d: Decomposition, more: dict[str, Any]) -> FieldLayer:
        options = {"affine": m.affine, "track_running_stats": m.track_running_stats, "dtype": _dtype(m)}
        return kind(m.num_features, grid, d, eps=m.eps, momentum=m.momentum, **options)  # type: ignore[no-any-return]

    return make


def _group_norm(m: Any, grid: CartesianGrid, d: Decomposition, more: dict[str, Any]) -> FieldLayer:
    return FieldGroupNorm(m.num_groups, m.num_channels, grid, d, eps=m.eps, affine=m.affine, dtype=_dtype(m))


def _layer_norm(m: Any, grid: CartesianGrid, d: Decomposition, more: dict[str, Any]) -> FieldLayer:
    options = {"eps": m.eps, "elementwise_affine": m.elementwise_affine, "dtype": _dtype(m)}
    return FieldLayerNorm(m.normalized_shape[0], grid, d, **options)


def _dropout(m: Any, grid: CartesianGrid, d: Decomposition, more: dict[str, Any]) -> FieldLayer:
    if m.inplace and m.p:
        raise ValueError("inplace=True would change what other parts of the module see")
    return FieldDropout(m.p, grid, d, whole_channels=type(m) is not nn.Dropout)


def _pad(m: Any, grid: CartesianGrid, d: Decomposition, more: dict[str, Any]) -> FieldLayer:
    modes = (("Reflection", "reflect"), ("Replication", "replicate"), ("Circular", "circular"))
    mode = next((mode for name, mode in modes if type(m).__name__.startswith(name)), "constant")
    return FieldPad(m.padding, grid, d, mode=mode, value=getattr(m, "value", 0.0), **more)


def _of(*names: str) -> tuple[type, ...]:
    """Torch's layers of these names, with the numbers of axes: [(Conv1d, Conv2d, Conv3d), ...]."""
    found = [getattr(nn, f"{name}{axes}d", None) for name in names for axes in (1, 2, 3)]
    return tuple(one for one in found if one is not None)


#: layers whose output may have other blocks, and layers that keep the field's shape
_MOVING: list[tuple[tuple[type, ...], Maker]] = [
    (_of("Conv"), _conv),
    (_of("ConvTranspose"), _conv_transpose),
    (_of("MaxPool"), _max_pool),
    (_of("AvgPool"), _avg_pool),
    (_of("AdaptiveAvgPool"), lambda m, grid, d, more: FieldAdaptiveAvgPool(m.output_size, grid, d, **more)),
    (_of("AdaptiveMaxPool"), lambda m, grid, d, more: FieldAdaptiveMaxPool(m.output_size, grid, d, **more)),
    (_of("ConstantPad", "ZeroPad", "ReflectionPad", "ReplicationPad", "CircularPad"), _pad),
]
_KEEPING: list[tuple[tuple[type, ...], Maker]] = [
    (_of("BatchNorm"), _running(FieldBatchNorm)),
    (_of("InstanceNorm"), _running(FieldInstanceNorm)),
    ((nn.GroupNorm,), _group_norm),
    ((nn.Dropout, *_of("Dropout")), _dropout),
]
#: layers on the last dimensions of a tensor, which must be channels
_POINTWISE = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.PReLU)
#: torch's modules that are traced through: containers, and those whose forward is a function that has a rule
_THROUGH: tuple[type, ...] = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle),
    *(nn.PixelUnshuffle, nn.ChannelShuffle, nn.Upsample, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU),
    *(nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Hardshrink, nn.Softshrink, nn.Softplus),
    *(nn.Softsign, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Tanhshrink, nn.Threshold, nn.Softmax, nn.LogSoftmax),
    *(nn.Softmin, nn.Softmax2d, nn.GLU),
)
#: what a class derived from torch's may define without being another layer
_HARMLESS = {
    *("__init__", "__doc__", "__module__", "__annotations__", "__annotate__", "__firstlineno__", "__dict__"),
    *("__static_attributes__", "__weakref__", "__constants__", "__repr__", "extra_repr", "reset_parameters"),
}
#: what would do in place of a module that is refused
_INSTEAD = {
    nn.MultiheadAttention: "tplayers.FieldAttention on the field [batch, channels, *space]",
    nn.TransformerEncoderLayer: "tplayers.FieldAttention on the field [batch, channels, *space]",
    nn.RNNBase: "convolutions, such as tplayers.FieldConv",
    nn.SyncBatchNorm: "nn.BatchNorm2d, which is of the whole field here",
}


def rule_of(m: nn.Module) -> LayerRule | None:
    """The rule for a call of ``m``; None if it is traced through, as modules of the user's own are."""
    if isinstance(m, FieldLayer):
        return _own
    classes = type(m).__mro__
    kind = next(one for one in classes if one.__module__.startswith("torch.nn."))
    own = {name for one in classes[: classes.index(kind)] for name in vars(one)}
    if kind is nn.Module or any(name in own and name not in _HARMLESS for name in dir(kind)):
        return None
    if isinstance(m, _THROUGH):
        return None
    if isinstance(m, _POINTWISE):
        return _points
    for table in (_MOVING, _KEEPING):
        for kinds, maker in table:
            if isinstance(m, kinds):
                return _replacement(maker, moving=table is _MOVING)
    return _refusal


def _refusal(t: FieldTracer, m: nn.Module, path: str, x: Traced) -> Traced:
    instead = next((text for kind, text in _INSTEAD.items() if isinstance(m, kind)), "")
    raise t.refused(f"nn.{type(m).__name__}", "there is no layer of fields for it", instead)


def _own(t: FieldTracer, m: nn.Module, path: str, x: Traced) -> Traced:
    """A layer of tplayers that stands in the user's module."""
    value: Value = x.value
    assert isinstance(m, FieldLayer)
    if not value.is_field or value.blocks != m.input:
        raise t.refused(type(m).__name__, f"it takes a field {m.input.blocks}, and gets {said(value)}")
    if type(m).__module__.startswith("tplayers.sharding"):
        raise t.refused("a module that is sharded already", "its channels are not known", "shard of the whole module")
    weight: Any = getattr(m, "weight", None)
    channels = value.whole.shape[1]
    if isinstance(m, (FieldConv, SpectralConv)):
        channels = int(weight.shape[isinstance(m, SpectralConv)])
    elif isinstance(m, FieldConvTranspose):
        channels = int(weight.shape[1]) * m.groups
    elif isinstance(m, FieldGlobalPool):
        return t.through(m, x, Value(traced((*value.whole.shape[:2], *m.output.shape), value.whole.dtype)), path)
    whole = traced((value.whole.shape[0], channels, *m.output.shape), value.whole.dtype)
    return t.through(m, x, Value(whole, m.output, value.space), path)


def _points(t: FieldTracer, m: nn.Module, path: str, x: Traced) -> Traced:
    """A layer on the last dimensions, or of PReLU on dimension 1."""
    value: Value = x.value
    if isinstance(m, nn.PReLU):
        if m.num_parameters > 1 and value.holds(1):
            raise t.refused("nn.PReLU", "dimension 1 is an axis of space", "permute before it")
        return _on_points(t, m, path, x)
    shape = getattr(m, "normalized_shape", (0,))
    if value.is_field and isinstance(m, nn.LayerNorm) and tuple(shape) == tuple(value.whole.shape[1:]):
        if m.elementwise_affine and m.bias is None:
            raise t.refused("nn.LayerNorm", "FieldLayerNorm has weight and bias, or none of them")
        return _replacement(_layer_norm, moving=False)(t, m, path, x)  # type: ignore[no-any-return]
    if any(value.holds(dim) for dim in range(-len(shape), 0)):
        instead = "nn.Conv of kernel size 1" if isinstance(m, nn.Linear) else "nn.GroupNorm(1, channels)"
        raise t.refused(
            f"nn.{type(m).__name__}",
            f"the last dimensions of {said(value)} are axes of space that ranks share",
            f"{instead}, or permute the channels to the end",
        )
    return _on_points(t, m, path, x)


def _on_points(t: FieldTracer, m: nn.Module, path: str, x: Traced) -> Traced:
    """``m`` on each point, or on a tensor that every rank has."""
    value: Value = x.value
    try:
        whole = meta_of(m, value.whole)
    except (RuntimeError, ValueError, TypeError) as error:
        raise t.refused(f"nn.{type(m).__name__}", str(error)) from error
    layer = t.layers.get(path)
    if layer is not None and not isinstance(layer, PointLayer):
        raise t.refused(f"nn.{type(m).__name__}", "it is called with a field and with a tensor that every rank has")
    return t.through(layer or PointLayer(m, t.grid), x, Value(whole, value.blocks, value.space), path or None)


def replace(t: FieldTracer, m: nn.Module, x: Traced) -> Traced:
    """The layer that takes the place of ``m``, which has no parameters and is not part of the module."""
    rule = rule_of(m)
    assert rule is not None
    return rule(t, m, "", x)  # type: ignore[no-any-return]


def _replacement(maker: Maker, *, moving: bool) -> LayerRule:
    def rule(t: FieldTracer, m: nn.Module, path: str, x: Traced, output_size: Any = None) -> Traced:
        value: Value = x.value
        if output_size is not None:
            m = of_output_size(t, m, path, value, output_size)
        name = f"nn.{type(m).__name__}"
        if value.blocks is None:
            if not isinstance(m, (nn.Dropout, *_of("Dropout"))):
                return _on_points(t, m, path, x)
            rate: Any = m.p
            if not rate:
                return x
            if value.whole.dim() != 2 or type(m) is not nn.Dropout:
                raise t.refused(
                    name, f"of {said(value)} it has no masks that all ranks share", "nn.Dropout after flatten"
                )
            return t.through(SharedDropout(rate, t.grid, t.field, whole_channels=True), x, value, path or None)
        _check(t, m, name, value)
        sizes = getattr(m, "output_size", None)
        if sizes is not None and all(one == 1 for one in (sizes if isinstance(sizes, (tuple, list)) else [sizes])):
            return pooled(t, x, "max" if "Max" in type(m).__name__ else "avg", path or None)
        before: Any = t.layers.get(path)
        if before is not None and isinstance(before, FieldLayer) and before.input == value.blocks:
            if not isinstance(before, FieldDropout):  # each place has a mask of its own
                return t.through(before, x, _result(m, before, value), path)
        elif before is not None and (m._parameters or m._buffers):
            raise t.refused(
                name,
                "it is called with fields in different blocks, or with a tensor of every rank, too",
                "a layer for each",
            )
        try:
            layer = maker(m, t.grid, value.blocks, {})
            wanted = t.blocks_of.get(layer.output.shape)
            if moving and wanted not in (None, layer.output):
                layer = maker(m, t.grid, value.blocks, {"output": wanted})
            take_over(layer, m)
        except (ValueError, RuntimeError) as error:
            raise t.refused(name, str(error)) from error
        return t.through(layer, x, _result(m, layer, value), path or None)

    return rule


def _result(m: nn.Module, layer: FieldLayer, value: Value) -> Value:
    if isinstance(layer, FieldDropout):
        return value
    channels = getattr(m, "out_channels", value.whole.shape[1])
    whole = traced((value.whole.shape[0], channels, *layer.output.shape), value.whole.dtype)
    return Value(whole, layer.output, value.space)


def _check(t: FieldTracer, m: nn.Module, name: str, value: Value) -> None:
    """Refuse what torch's layer would not take, or would take as something else than a field."""
    axes = len(t.grid.shape)
    if not value.is_field:
        raise t.refused(name, f"it needs [batch, channels, *space], not {said(value)}", "permute before it")
    if getattr(m, "return_indices", False):
        raise t.refused(name, "return_indices would give positions within a block")
    if name[-2:] in ("1d", "2d", "3d") and int(name[-2]) != axes:
        raise t.refused(name, f"the field has {axes} axes of space")
    needed = next((getattr(m, n) for n in ("in_channels", "num_features", "num_channels") if hasattr(m, n)), None)
    if needed not in (None, value.whole.shape[1]):
        raise t.refused(name, f"it takes {needed} channels, and gets {said(value)}", "shard(..., channels=...)")


def take_over(layer: nn.Module, m: nn.Module) -> None:
    """Give ``layer`` the parameters of ``m``, its mode, its device, and which of them are trained."""
    if m._parameters or m._buffers:
        some = next((one for one in (*m.parameters(), *m.buffers())), None)
        if some is not None:
            layer.to(some.device)
        layer.load_state_dict(m.state_dict())
        for name, parameter in m.named_parameters():
            layer.get_parameter(name).requires_grad_(parameter.requires_grad)
    layer.train(m.training)
