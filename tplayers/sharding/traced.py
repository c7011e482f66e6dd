"""What stands for a tensor in the forward that is traced."""

from __future__ import annotations

import itertools
import linecache
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from .values import BATCH, Number, Value

#: the folders of torch and of this room
TORCH, HERE = str(Path(torch.__file__).parent), str(Path(__file__).parent)


def _asked(frame: FrameType) -> bool:
    """Whether ``frame`` stands in a call of isinstance by another module than torch's and these here.

    torch's own code in C asks for the class, too, and would read a tensor where there is none. Raises ValueError if it
    cannot know.
    """
    code = frame.f_code
    if code.co_filename.startswith((TORCH, HERE)):
        return code.co_name == "is_tensor"
    if "isinstance" not in code.co_names:
        return False
    line, _, column, _ = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
    text = linecache.getline(code.co_filename, line or 0).encode()
    if not text:
        raise ValueError(f"{code.co_name} asks for a type, and its source is not there to see of what")
    return text[column or 0 :].startswith(b"isinstance(")


class Traced(fx.Proxy):
    """A tensor, or a size that depends on the batch, in the forward that is traced."""

    #: a FieldTracer
    tracer: Any
    #: for isinstance(x, nn.Parameter)
    _is_param = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Where a forward asks by isinstance whether this is a torch.Tensor, it gets the answer that a tensor gives."""
        asked = isinstance(self.tracer.values.get(self.node), Value) and _asked(sys._getframe(1))
        return Tensor if asked else Traced

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Tensor, name):
            raise AttributeError(f"a torch.Tensor has no attribute {name!r}")
        return super().__getattr__(name)

    @property
    def value(self) -> Any:
        return self.tracer.values[self.node]

    @property
    def shape(self) -> Sizes:
        whole = self.value.whole
        return Sizes(self.size(dim) for dim in range(whole.dim()))

    @property
    def ndim(self) -> int:
        return int(self.value.whole.dim())

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        if dim is None:
            return self.shape
        size = int(self.value.whole.shape[dim])
        if size % BATCH or not size:
            return size
        if size == BATCH and self.value.blocks is not None and self.tracer.batch is not None:
            return self.tracer.batch
        return self.tracer.emit("call_method", "size", (self, dim), {}, Number(size))

    def __setitem__(self, index: Any, value: Any) -> None:
        raise self.tracer.refused("an assignment to a part of a tensor", "it is in place", "torch.cat or torch.where")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("node", "tracer"):
            raise self.tracer.refused(f"an assignment to the attribute {name}", "a trace does not see it")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        raise self.tracer.refused("len() of a tensor", "it is the batch", "x.shape[0]")

    def _in_place(self, function: Callable[..., Any], other: Any) -> Any:
        if isinstance(self.value, Number):
            return function(self, other)
        return self.tracer.create_proxy("call_method", f"{function.__name__}_", (self, other), {})

    def __iadd__(self, other: Any) -> Any:
        return self._in_place(operator.add, other)

    def __isub__(self, other: Any) -> Any:
        return self._in_place(operator.sub, other)

    def __imul__(self, other: Any) -> Any:
        return self._in_place(operator.mul, other)

    def __itruediv__(self, other: Any) -> Any:
        if isinstance(self.value, Number):
            return self / other
        return self.tracer.create_proxy("call_method", "div_", (self, other), {})

    def __ipow__(self, other: Any) -> Any:
        return self._in_place(operator.pow, other)

    def _refused_in_place(self, other: Any) -> Any:
        raise self.tracer.refused(
            "an operator in place", "there are +=, -=, *=, /= and **=", "one that makes a new tensor"
        )

    # torch.fx would take the operator that makes a new tensor, and other names of the old one would not see the change.
    __ifloordiv__ = __imod__ = __iand__ = __ior__ = __ixor__ = __imatmul__ = _refused_in_place
    __ilshift__ = __irshift__ = _refused_in_place


class Sizes(tuple[Any, ...]):
    """A tensor's shape; a size that depends on the batch is a `Traced`."""
