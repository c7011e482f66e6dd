"""A call of a function or method in the forward that is traced, and what all rules do with one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commengine import Decomposition
from commengine.torch_private import private

from .traced import Traced
from .tracer import FieldTracer
from .values import Number, Refused, Value


class Extremes(NamedTuple):
    """What max and min along a dimension return."""

    values: Any
    indices: Any


@dataclass
class FieldCall:
    """A call of a function or method in the module's forward. x: the first tensor."""

    t: FieldTracer
    kind: str
    target: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.args and self.kind == "call_function" and "input" in self.kwargs:
            self.args = (self.kwargs["input"],)
            self.kwargs = {name: one for name, one in self.kwargs.items() if name != "input"}
        found = [one for one in private("tree_leaves")((self.args, self.kwargs)) if isinstance(one, Traced)]
        self.tensors = [one for one in found if isinstance(one.value, Value)]
        self.fields = [one for one in self.tensors if one.value.blocks is not None]

    @property
    def x(self) -> Traced:
        return self.args[0]  # type: ignore[no-any-return]

    @property
    def value(self) -> Value:
        return self.x.value  # type: ignore[no-any-return]

    @property
    def in_place(self) -> bool:
        """Whether the call changes its first tensor."""
        name = self.target if self.kind == "call_method" else getattr(self.target, "__name__", "")
        return (name.endswith("_") and not name.endswith("__")) or bool(self.kwargs.get("inplace"))

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by its place or its name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def whole(self) -> Any:
        """What torch makes of the whole tensors."""

        def known(one: Any) -> Any:
            if not isinstance(one, Traced):
                return one
            return one.value.value if isinstance(one.value, Number) else one.value.whole

        args, kwargs = private("tree_map")(known, (self.args, self.kwargs))
        try:
            with torch.no_grad():
                function = getattr(args[0], self.target) if self.kind == "call_method" else self.target
                return function(*(args[1:] if self.kind == "call_method" else args), **kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AttributeError) as error:
            raise self.refused(str(error).split("\n")[0]) from error

    def emit(self, value: Any, args: tuple[Any, ...] | None = None) -> Traced:
        """Emit the call as it stands, with ``args`` in place of its own if they are given."""
        return self.t.emit(self.kind, self.target, self.args if args is None else args, self.kwargs, value)

    def emit_like(self, whole: Tensor) -> Traced:
        """Emit the call; the result ``whole`` is split as the first tensor is."""
        return self.emit(Value(whole, self.value.blocks, self.value.space))

    def keep(self, value: Value, whole: Tensor) -> None:
        """Let nothing change ``value``, or the result ``whole``, in place.

        The one may be a view of the other in torch and a copy here, or the other way around.
        """
        self.t.frozen.update((value.storage, Value(whole).storage))

    def of(self, one: Traced) -> bool:
        """Whether ``one`` is one of the call's fields; `Traced` compares as a tensor does, so by identity."""
        return any(field is one for field in self.fields)

    def refused(self, why: str, instead: str = "") -> Refused:
        """The error for this call."""
        said = getattr(self.target, "__name__", self.target)
        return self.t.refused(f"the {'method' if self.kind == 'call_method' else 'function'} {said}", why, instead)


def emit_results(c: FieldCall, whole: Any, value_of: Callable[[Tensor], Value]) -> Any:
    """Emit a call that returns a tensor, or several."""
    if isinstance(whole, Tensor):
        return c.emit(value_of(whole))
    if not isinstance(whole, (tuple, list)):
        return c.emit(Number(whole))
    several = c.emit(None)
    found = [c.t.emit("call_function", operator.getitem, (several, n), {}, value_of(w)) for n, w in enumerate(whole)]
    return Extremes(*found) if c.name in ("max", "min") else tuple(found)


def require_shape(c: FieldCall, y: Traced) -> None:
    """Refuse the call unless torch's result has the shape of ``y``, which a layer of fields makes."""
    expected = c.whole().shape
    if y.value.whole.shape != expected:
        raise c.refused(f"torch makes {list(expected)} of it, and the layer of fields {list(y.value.whole.shape)}")


def emit_aligned(c: FieldCall, whole: Tensor, blocks: Decomposition, space: tuple[int, ...]) -> Traced:
    """Emit the call with operands that are cut as the result is."""

    def aligned(one: Any) -> Any:
        is_tensor = isinstance(one, Traced) and isinstance(one.value, Value)
        return c.t.cut(one, blocks, space, whole) if is_tensor else one

    args, kwargs = private("tree_map")(aligned, (c.args, c.kwargs))
    return c.t.emit(c.kind, c.target, args, kwargs, Value(whole, blocks, space))


def dims_of(c: FieldCall, place: int, name: str = "dim") -> list[int] | None:
    """The dimensions that the call names, counted from the end; None for all of them."""
    given = c.argument(place, name, c.kwargs.get("axis"))
    if c.name == "flip" and len(c.args) > 2:  # x.flip(2, 3)
        given = c.args[1:]
    if given is None:
        return None
    count = c.value.whole.dim()
    try:
        return [d - count if d >= 0 else d for d in (given if isinstance(given, (tuple, list)) else [given])]
    except TypeError as error:
        raise c.refused(f"{name}={given!r} is not a dimension") from error
