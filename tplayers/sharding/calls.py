"""A call of a function or method in the forward, and what all rules do with one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commengine import Decomposition

from . import names
from .step import LocalStep
from .values import Refused, Value, rebuilt


@dataclass
class FieldCall:
    """A call of a function or method in the module's forward. x: the first tensor."""

    t: LocalStep
    function: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.args and "input" in self.kwargs:
            self.args = (self.kwargs["input"],)
            self.kwargs = {name: one for name, one in self.kwargs.items() if name != "input"}
        self.fields = [one for one in self.t.given if one.blocks is not None]
        self.x: Any = self.args[0] if self.args else None

    @property
    def title(self) -> str:
        """What an error says of the call."""
        return f"the {'method' if names.is_method(self.function) else 'function'} {self.function.__name__}"

    @property
    def in_place(self) -> bool:
        """Whether the call changes its first tensor."""
        name, wanted = self.function.__name__, bool(self.kwargs.get("inplace"))
        return wanted or name in ("__iand__", "__ior__") or (name.endswith("_") and not name.endswith("__"))

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by its place or its name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def whole(self) -> Any:
        """What torch makes of the whole tensors."""
        args, kwargs = rebuilt((self.args, self.kwargs), Value, lambda one: one.whole)
        try:
            with torch.no_grad():
                return self.function(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AttributeError) as error:
            raise self.refused(str(error).split("\n")[0]) from error

    def emit(self, value: Value, args: tuple[Any, ...] | None = None) -> Value:
        """Emit the call as it stands, with ``args`` in place of its own if they are given."""
        return self.t.emit(self.function, self.args if args is None else args, self.kwargs, value)

    def emit_like(self, whole: Tensor) -> Value:
        """Emit the call; the result ``whole`` is split as the first tensor is."""
        return self.emit(Value(whole, self.x.blocks, self.x.space))

    def refused(self, why: str, instead: str = "") -> Refused:
        """The error for this call."""
        return self.t.refused(self.title, why, instead)


def emit_results(c: FieldCall, whole: Any, value_of: Callable[[Tensor], Value]) -> Any:
    """Emit a call that returns a tensor, several, or a number."""
    if isinstance(whole, Tensor):
        return c.emit(value_of(whole))
    if not isinstance(whole, (tuple, list)):
        return whole
    several = c.emit(c.x)
    return type(whole)([c.t.emit(operator.getitem, (several, n), {}, value_of(w)) for n, w in enumerate(whole)])


def require_shape(c: FieldCall, y: Value) -> None:
    """Refuse the call unless torch's result has the shape of ``y``, which a layer of fields makes."""
    expected = c.whole().shape
    if y.shape != expected:
        raise c.refused(f"torch makes {list(expected)} of it, and the layer of fields {list(y.shape)}")


def emit_aligned(c: FieldCall, whole: Tensor, blocks: Decomposition, space: tuple[int, ...]) -> Value:
    """Emit the call with operands that are cut as the result is."""
    args, kwargs = rebuilt((c.args, c.kwargs), Value, lambda one: c.t.cut(one, blocks, space, whole))
    return c.t.emit(c.function, args, kwargs, Value(whole, blocks, space))


def dims_of(c: FieldCall, place: int, name: str = "dim") -> list[int] | None:
    """The dimensions that the call names, counted from the end; None for all of them."""
    given = c.argument(place, name, c.kwargs.get("axis"))
    if c.name == "flip" and len(c.args) > 2:  # x.flip(2, 3)
        given = c.args[1:]
    if given is None:
        return None
    count = c.x.whole.dim()
    return [d - count if d >= 0 else d for d in (given if isinstance(given, (tuple, list)) else [given])]
