"""The functions and methods of torch that a sharded module may call. What is not named here is refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_POINTWISE = """
    abs absolute neg negative positive sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal pow sin cos
    tan asin acos atan sinh cosh tanh asinh acosh atanh atan2 erf erfc floor ceil round trunc frac sigmoid logit sinc
    relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh hardshrink softshrink softplus
    softsign logsigmoid log_sigmoid tanhshrink threshold _threshold clamp clip clamp_min clamp_max nan_to_num add sub
    subtract mul multiply div divide true_divide truediv floordiv floor_divide mod remainder fmod maximum minimum fmax
    fmin hypot lerp addcmul addcdiv where masked_fill eq ne lt le gt ge logical_and logical_or logical_not isnan
    isfinite isinf invert contiguous clone detach to type float double half bfloat16 bool int long type_as zeros_like
    ones_like expand_as
"""
_OTHERS = """
    getitem interpolate upsample pad pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle layer_norm
    linear prelu dropout dropout1d dropout2d dropout3d roll flip
"""
#: of each element by itself
POINTWISE = frozenset(_POINTWISE.split())
#: along a dimension, and where its number is among the arguments
ALONG = {"softmax": 1, "log_softmax": 1, "softmin": 1, "glu": 1, "cumsum": 1, "cumprod": 1, "normalize": 2}
#: these reduce a dimension
REDUCING = {
    **dict.fromkeys(("mean", "sum", "amax", "amin", "max", "min", "prod", "logsumexp", "std", "var"), 1),
    **dict.fromkeys(("argmax", "argmin", "any", "all"), 1),
    "norm": 2,
}
RESHAPING = frozenset({"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as"})
PERMUTING = frozenset({"permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims"})
SPLITTING = {"chunk": 2, "split": 2, "tensor_split": 2, "unbind": 1}
JOINING = frozenset({"cat", "concat", "concatenate"})
_KINDS = [(kind, name, axes) for kind, name in (("max", "Max"), ("avg", "Avg")) for axes in (1, 2, 3)]
#: functions that are layers, and the names of these in torch.nn
POOLS = {
    **{f"{kind}_pool{axes}d": f"{name}Pool{axes}d" for kind, name, axes in _KINDS},
    **{f"adaptive_{kind}_pool{axes}d": f"Adaptive{name}Pool{axes}d" for kind, name, axes in _KINDS},
}
#: the order of their arguments, which is not that of the layers
PLACES = {
    "max": ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    "avg": ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    "ada": ("output_size", "return_indices"),
}
#: functions with a rule of their own
OTHERS = frozenset(_OTHERS.split())
#: these are right for tensors that every rank has, and refused for split ones
WHOLE = frozenset({"matmul", "bmm", "mm", "einsum", "expand", "repeat", "stack", "outer", "numel"})
KNOWN = frozenset().union(POINTWISE, ALONG, REDUCING, RESHAPING, PERMUTING, SPLITTING, JOINING, POOLS, OTHERS, WHOLE)
_BETWEEN = "a convolution of kernel size 1 along channels, or tplayers.FieldAttention between points"
#: what would do in place of a function that is refused
INSTEAD = {
    "fft": "tplayers.SpectralConv",
    "scaled_dot_product_attention": "tplayers.FieldAttention",
    "multi_head_attention_forward": "tplayers.FieldAttention",
    **{f"conv{axes}d": f"nn.Conv{axes}d as a layer of the module" for axes in (1, 2, 3)},
    **{f"conv_transpose{axes}d": f"nn.ConvTranspose{axes}d as a layer of the module" for axes in (1, 2, 3)},
    "batch_norm": "nn.BatchNorm2d",
    "group_norm": "nn.GroupNorm",
    "instance_norm": "nn.InstanceNorm2d",
    "einsum": _BETWEEN,
    "matmul": _BETWEEN,
    "bmm": _BETWEEN,
    "stack": "torch.cat along channels",
    "unfold": "a convolution, or tplayers.FieldAttention in windows",
    "expand": "torch.zeros_like(x) + tensor, which broadcasts",
    **dict.fromkeys(("rand_like", "randn_like"), "noise that is drawn outside and is an input of the module"),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full"), "torch.zeros_like or torch.ones_like of a field"),
}


#: an attribute or method of this name says something of the whole tensor, which is known without values
ANSWERED = frozenset({"size", "dim", "ndim", "numel", "__len__", "is_floating_point", "is_complex", "layout"})
#: what Python's syntax calls: the part, why, and what to use instead
REFUSED = {
    "__bool__": (
        "control flow that depends on values",
        "ranks could take different ways, and shard looks without values",
        "torch.where, or a condition on shapes or settings",
    ),
    "__setitem__": ("an assignment to a part of a tensor", "it is in place", "torch.cat or torch.where"),
}


def _functions() -> dict[Any, str]:
    found: dict[Any, str] = {}
    for name in sorted(KNOWN):
        for owner in (torch, F, torch._C._nn, torch.special):
            for function in (getattr(owner, name, None), getattr(owner, f"{name}_", None)):
                if callable(function):
                    found.setdefault(function, name)
    return found


_FUNCTIONS = _functions()


def is_method(function: Any) -> bool:
    """Whether ``function`` is a method or an operator of torch.Tensor."""
    return "Tensor" in getattr(function, "__qualname__", "").partition(".")[0]


def name_of(function: Any) -> str | None:
    """The known name of a function, method or operator, without the underscore of one in place; None: unknown."""
    if not is_method(function):
        return _FUNCTIONS.get(function)
    name = function.__name__
    plain = name.strip("_")
    plain = plain[1:] if name.startswith(("__r", "__i")) and plain[1:] in KNOWN | {"and", "or"} else plain
    plain = f"logical_{plain}" if plain in ("and", "or") else plain
    return plain if plain in KNOWN else None
