"""A device that computes nothing: large operations allocate their results and add up the time that they would take.

Under the mode, an operation on small tensors or on integers runs as always, so losses, norms and indices keep their
meaning. The result of an operation on large tensors is zeros, which take no room until somebody writes them. Views are
views, and operations in place leave their tensor as it is.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from bench.emulator.machine import EmulatedMachine

#: an operation whose tensors have fewer elements together runs as always
LARGE = 4096
#: operations whose results depend on the numbers, and which programs use on small tensors only
_BY_VALUE = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2"}
#: operations that run no kernel
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach"}
#: mallopt's parameter for the size from which memory comes from the system, where it is zeros that take no room
_M_MMAP_THRESHOLD = -3


class EmulatedDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The device of one rank. seconds: what it has computed since somebody set it to 0."""

    def __init__(self, machine: EmulatedMachine, rank: int, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0
        if sys.platform == "linux":
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 4 * LARGE)
        self._machine, self._speed = machine, machine.speed[rank]
        self._draw = random.Random(1000 * seed + rank)
        self._fake = FakeTensorMode()
        self._shapes: dict[Any, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        aliases = [one.alias_info for one in schema.returns]
        viewing = any(alias is not None and not alias.is_write for alias in aliases)
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        exact = bool(given) and not any(one.is_floating_point() for one in given)
        if viewing or exact or schema.name.removeprefix("aten::") in _BY_VALUE:
            return func(*args, **kwargs)
        elements = sum(one.numel() for one in given)
        if schema.is_mutable:
            self._charge(func, args, kwargs, given, None)
            return func(*args, **kwargs) if elements < LARGE else _written(schema, args, kwargs)
        if given and elements < LARGE and not _grows(func):
            result = func(*args, **kwargs)
            self._charge(func, args, kwargs, given, result)
            return result
        result = self._allocated(func, args, kwargs, given)
        made = sum(one.numel() for one in tree_flatten(result)[0] if isinstance(one, Tensor))
        if made + elements < LARGE:
            result = func(*args, **kwargs)
        self._charge(func, args, kwargs, given, result)
        return result

    def _allocated(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        """Memory for the results, of the shapes that torch's own rules give."""
        flat, spec = tree_flatten((args, kwargs))
        key = (func, str(spec), str([_layout(one) for one in flat]))
        if key not in self._shapes:
            fake = tree_map(_as_fake(self._fake), (args, kwargs))
            with self._fake:
                self._shapes[key] = tree_map(_layout, func(*fake[0], **fake[1]))
        return tree_map(_memory, self._shapes[key])

    def _charge(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], result: Any) -> None:
        name = func._schema.name
        if name.startswith("profiler::") or name.removeprefix("aten::") in _FREE:
            return
        machine = self._machine
        made = [one for one in tree_flatten(result)[0] if isinstance(one, Tensor)]
        count: Any = _ATTENTION.get(name) or flop_registry.get(func._overloadpacket)
        if count is not None:
            flops = count(*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made))
            seconds = (flops + machine.half_flops) / machine.flops
        else:
            written = given[:1] if result is None else made
            moved = sum(one.numel() * one.element_size() for one in (*given, *written))
            seconds = moved / machine.memory_rate
        noise = max(0.0, self._draw.gauss(1.0, machine.noise))
        self.seconds += (machine.launch + seconds) * self._speed * noise


def _attended(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> float:
    """The FLOPs of attention. Its masked half is not computed."""
    causal = len(rest) > 1 and rest[1]
    whole: int = sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    return whole / (2 if causal else 1)


def _attended_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, dropout: float,
    causal: bool, **_: Any,
) -> float:  # fmt: skip
    """The same of its backward."""
    shapes = (one.shape for one in (gradient, query, key, value))
    whole: int = sdpa_backward_flop_count(*shapes)  # type: ignore[no-untyped-call]
    return whole / (2 if causal else 1)


#: torch counts the FLOPs of attention's kernels for GPUs only
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attended,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attended_backward,
}


class _Layout(tuple[Any, ...]):
    """Shape, strides and dtype of a result; no tuple to torch's trees, because it is another class."""


def _layout(one: Any) -> Any:
    return _Layout((tuple(one.shape), one.stride(), one.dtype)) if isinstance(one, Tensor) else one


def _memory(one: Any) -> Any:
    if not isinstance(one, _Layout):
        return one
    shape, strides, dtype = one
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else -1
    # NumPy asks for zeros (calloc), so the system's fresh pages are not written. A loss must be finite.
    zeros = torch.from_numpy(np.zeros((last + 1) * dtype.itemsize, np.uint8))
    return torch.empty(0, dtype=dtype).set_(zeros.untyped_storage(), 0, shape, strides)


def _as_fake(mode: FakeTensorMode) -> Callable[[Any], Any]:
    return lambda one: mode.from_tensor(one.detach()) if isinstance(one, Tensor) else one


def _grows(func: Any) -> bool:
    """Whether small tensors may have a large result."""
    return func._overloadpacket in flop_registry or "embedding" in func._schema.name or "expand" in func._schema.name


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of an operation in place: the arguments that it writes."""
    named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    results = []
    for result in schema.returns:
        target = next(
            (one.name for one in schema.arguments
             if one.alias_info is not None and result.alias_info is not None
             and one.alias_info.before_set == result.alias_info.before_set), None,
        )  # fmt: skip
        results.append(named.get(target))
    return None if not results else results[0] if len(results) == 1 else tuple(results)
