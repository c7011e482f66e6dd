"""The rules for layers: which layer of fields takes the place of which layer of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

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

from .parts import PointLayer, SharedDropout
from .resizing import pooled
from .step import LocalStep
from .values import Refused, Value, said, shaped

#: a rule for a call of a layer: (step, layer, its path in the module, the tensor that goes in), and an output_size
LayerRule = Callable[..., Any]
#: makes a layer: (torch's layer, grid, blocks of the input, {"output": blocks} or {})
Maker = Callable[[Any, CartesianGrid, Decomposition, dict[str, Any]], FieldLayer]


def _same(kind: Any, args: str, options: str = "") -> Maker:
    """Make ``kind`` with the arguments of these names that torch's layer has."""

    def make(m: Any, grid: CartesianGrid, d: Decomposition, more: dict[str, Any]) -> FieldLayer:
        given = {name: getattr(m, name) for name in options.split()}
        if getattr(m, "divisor_override", None) is not None:
            raise ValueError("there is no divisor_override")
        if "bias" in given:
            given["bias"] = m.bias is not None
        if {"bias", "eps"} & {*given}:
            tensors = (*m.parameters(), *m.buffers())
            given["dtype"] = next((one.dtype for one in tensors if one.is_floating_point()), None)
        return kind(*[getattr(m, name) for name in args.split()], grid, d, **given, **more)  # type: ignore[no-any-return]

    return make


def _layer_norm(m: Any, grid: CartesianGrid, d: Decomposition, more: dict[str, Any]) -> FieldLayer:
    options = {"eps": m.eps, "elementwise_affine": m.elementwise_affine, "dtype": getattr(m.weight, "dtype", None)}
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


_CHANNELS, _WINDOW = "in_channels out_channels kernel_size", "stride padding dilation groups bias"
_RUNNING = "eps momentum affine track_running_stats"
#: layers whose output may have other blocks, and layers that keep the field's shape
_MOVING: list[tuple[tuple[type, ...], Maker]] = [
    (_of("Conv"), _same(FieldConv, _CHANNELS, f"{_WINDOW} padding_mode")),
    (_of("ConvTranspose"), _same(FieldConvTranspose, _CHANNELS, f"{_WINDOW} output_padding")),
    (_of("MaxPool"), _same(FieldMaxPool, "kernel_size", "stride padding dilation ceil_mode")),
    (_of("AvgPool"), _same(FieldAvgPool, "kernel_size", "stride padding ceil_mode count_include_pad")),
    (_of("AdaptiveAvgPool"), _same(FieldAdaptiveAvgPool, "output_size")),
    (_of("AdaptiveMaxPool"), _same(FieldAdaptiveMaxPool, "output_size")),
    (_of("ConstantPad", "ZeroPad", "ReflectionPad", "ReplicationPad", "CircularPad"), _pad),
]
_DROPOUTS = (nn.Dropout, *_of("Dropout"))
_KEEPING: list[tuple[tuple[type, ...], Maker]] = [
    (_of("BatchNorm"), _same(FieldBatchNorm, "num_features", _RUNNING)),
    (_of("InstanceNorm"), _same(FieldInstanceNorm, "num_features", _RUNNING)),
    ((nn.GroupNorm,), _same(FieldGroupNorm, "num_groups num_channels", "eps affine")),
    (_DROPOUTS, _dropout),
]
#: layers on the last dimensions of a tensor, which must be channels
_POINTWISE = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.PReLU)
#: torch's modules that run as they are: containers, and those whose forward is a function that has a rule
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
    """The rule for a call of ``m``; None if it runs as it is, as modules of the user's own are."""
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


def _refusal(t: LocalStep, m: nn.Module, path: str, x: Value) -> Value:
    instead = next((text for kind, text in _INSTEAD.items() if isinstance(m, kind)), "")
    raise t.refused(f"nn.{type(m).__name__}", "there is no layer of fields for it", instead)


def _own(t: LocalStep, m: nn.Module, path: str, x: Value) -> Value:
    """A layer of tplayers that stands in the user's module."""
    assert isinstance(m, FieldLayer)
    if not x.is_field or x.blocks != m.input:
        raise t.refused(type(m).__name__, f"it takes a field {m.input.blocks}, and gets {said(x)}")
    if type(m).__module__.startswith("tplayers.sharding"):
        raise t.refused("a module that is sharded already", "its channels are not known", "shard of the whole module")
    weight: Any = getattr(m, "weight", None)
    channels = x.shape[1]
    if isinstance(m, (FieldConv, SpectralConv)):
        channels = weight.shape[isinstance(m, SpectralConv)]
    elif isinstance(m, FieldConvTranspose):
        channels = weight.shape[1] * m.groups
    whole = shaped((x.shape[0], channels, *m.output.shape), x.whole.dtype)
    everywhere = isinstance(m, FieldGlobalPool)
    return t.through(m, x, Value(whole) if everywhere else Value(whole, m.output, x.space))


def _points(t: LocalStep, m: nn.Module, path: str, x: Value) -> Value:
    """A layer on the last dimensions, or of PReLU on dimension 1."""
    if isinstance(m, nn.PReLU):
        if m.num_parameters > 1 and x.holds(1):
            raise t.refused("nn.PReLU", "dimension 1 is an axis of space", "permute before it")
        return _on_points(t, m, path, x)
    shape = getattr(m, "normalized_shape", (0,))
    if x.is_field and isinstance(m, nn.LayerNorm) and tuple(shape) == tuple(x.shape[1:]):
        if m.elementwise_affine and m.bias is None:
            raise t.refused("nn.LayerNorm", "FieldLayerNorm has weight and bias, or none of them")
        return _replacement(_layer_norm, moving=False)(t, m, path, x)  # type: ignore[no-any-return]
    if any(x.holds(dim) for dim in range(-len(shape), 0)):
        instead = "nn.Conv of kernel size 1" if isinstance(m, nn.Linear) else "nn.GroupNorm(1, channels)"
        why = f"the last dimensions of {said(x)} are axes of space that ranks share"
        raise t.refused(f"nn.{type(m).__name__}", why, f"{instead}, or permute the channels to the end")
    return _on_points(t, m, path, x)


def _on_points(t: LocalStep, m: nn.Module, path: str, x: Value) -> Value:
    """``m`` on each point, or on a tensor that every rank has."""
    try:
        whole = copy.deepcopy(m).to("meta")(x.whole).detach()
    except (RuntimeError, ValueError, TypeError) as error:
        raise t.refused(f"nn.{type(m).__name__}", str(error)) from error
    layer = _layer(t, m, path, "points", lambda: PointLayer(m, t.grid))
    return t.through(layer, x, Value(whole, x.blocks, x.space))


def replace(t: LocalStep, kind: type[nn.Module], options: dict[str, Any], x: Value) -> Value:
    """The layer for a function that does what ``kind(**options)`` does, a layer without parameters."""
    m = kind(**options)
    rule: Any = rule_of(m)
    return rule(t, m, f"{kind.__name__}({options})", x)  # type: ignore[no-any-return]


def _layer(t: LocalStep, m: nn.Module, path: str, kind: Any, make: Callable[[], nn.Module]) -> nn.Module:
    """The layer of ``kind`` in the place of ``m``; one with parameters has one kind."""
    kinds = [one for place, one in t.program.layers if place == path]
    held = bool(m._parameters or m._buffers)
    if held and kinds and kind not in kinds:
        why = "it is called with fields in different blocks, or with a tensor of every rank, too"
        raise t.refused(f"nn.{type(m).__name__}", why, "a layer for each")
    return t.program.layer(path, kind, make, kept=held or is_dropout(m))  # type: ignore[no-any-return]


def _output_padding(t: LocalStep, m: Any, path: str, x: Value, size: Any) -> nn.Module:
    """The transposed convolution ``m`` with the output_padding for an output of ``size``: its last numbers count."""
    wanted = tuple(size)[-len(m.kernel_size) :] if isinstance(size, (tuple, list)) else (size,)
    each = zip(wanted, x.shape[-len(m.kernel_size) :], m.kernel_size, m.stride, m.padding, m.dilation, strict=True)
    sized = copy.copy(m)
    sized.output_padding = tuple(w - (n - 1) * s + 2 * p - d * (k - 1) - 1 for w, n, k, s, p, d in each)
    before = t.program.layers.get((path, x.blocks))
    if min(sized.output_padding) < 0 or (isinstance(before, FieldLayer) and before.output.shape != wanted):
        raise t.refused(f"nn.{type(m).__name__}", f"output_size={wanted} does not fit, or differs from another call's")
    return sized  # type: ignore[no-any-return]


def _replacement(maker: Maker, *, moving: bool) -> LayerRule:
    def rule(t: LocalStep, m: Any, path: str, x: Value, output_size: Any = None) -> Value:
        if output_size is not None:
            m = _output_padding(t, m, path, x, output_size)
        name, blocks = f"nn.{type(m).__name__}", x.blocks
        if blocks is None:
            if not is_dropout(m):
                return _on_points(t, m, path, x)
            if not m.p:
                return x
            if x.whole.dim() != 2 or type(m) is not nn.Dropout:
                raise t.refused(name, f"of {said(x)} it has no masks that all ranks share", "nn.Dropout after flatten")
            field = t.program.field
            layer = _layer(t, m, path, t.count, lambda: SharedDropout(m.p, t.grid, field, whole_channels=True))
            return t.through(layer, x, x)
        _check(t, m, name, x)
        sizes = getattr(m, "output_size", None)
        if sizes is not None and all(one == 1 for one in (sizes if isinstance(sizes, (tuple, list)) else [sizes])):
            return pooled(t, x, "max" if "Max" in type(m).__name__ else "avg", path)

        def make() -> nn.Module:
            layer = maker(m, t.grid, blocks, {})
            wanted = t.program.blocks_of.get(layer.output.shape)
            if moving and wanted not in (None, layer.output):
                layer = maker(m, t.grid, blocks, {"output": wanted})
            take_over(layer, m)
            return layer

        try:
            made: Any = _layer(t, m, path, t.count if is_dropout(m) else blocks, make)
        except Refused:
            raise
        except (ValueError, RuntimeError) as error:
            raise t.refused(name, str(error)) from error
        if is_dropout(m):
            return t.through(made, x, x)
        whole = shaped((x.shape[0], getattr(m, "out_channels", x.shape[1]), *made.output.shape), x.whole.dtype)
        return t.through(made, x, Value(whole, made.output, x.space))

    return rule


def is_dropout(m: nn.Module) -> bool:
    """Whether each call of ``m`` has a mask of its own."""
    return isinstance(m, _DROPOUTS)


def _check(t: LocalStep, m: nn.Module, name: str, x: Value) -> None:
    """Refuse what torch's layer would not take, or would take as something else than a field."""
    axes = len(t.grid.shape)
    if not x.is_field:
        raise t.refused(name, f"it needs [batch, channels, *space], not {said(x)}", "permute before it")
    if getattr(m, "return_indices", False):
        raise t.refused(name, "return_indices would give positions within a block")
    if name[-2:] in ("1d", "2d", "3d") and int(name[-2]) != axes:
        raise t.refused(name, f"the field has {axes} axes of space")
    needed = next((getattr(m, n) for n in ("in_channels", "num_features", "num_channels") if hasattr(m, n)), None)
    if needed not in (None, x.shape[1]):
        raise t.refused(name, f"it takes {needed} channels, and gets {said(x)}", "shard(..., channels=...)")


def take_over(layer: nn.Module, m: nn.Module) -> None:
    """Give ``layer`` the parameters and buffers of ``m``, as its own, and its mode."""
    if m._parameters or m._buffers:
        shapes = [{name: one.shape for name, one in each.state_dict().items()} for each in (layer, m)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"its parameters {shapes[1]} are not those of {type(layer).__name__}, {shapes[0]}")
        layer.__dict__.update(_parameters=m._parameters, _buffers=m._buffers)
    layer.train(m.training)
