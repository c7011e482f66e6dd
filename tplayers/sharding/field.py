"""The tensor that a sharded module's forward sees: it has the shape of the whole, and holds this rank's block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .values import Value


class Alias:
    """What tensors that share memory have in common. frozen: 1: no call may change the values; 2: nor the shape."""

    def __init__(self, frozen: int) -> None:
        self.frozen = frozen


class Field(Tensor):
    """A tensor of the forward. To torch itself it is empty; all that Python asks of it, it answers for the whole.

    local: this rank's block, or the whole tensor, which every rank has; None if there are no values (`Program.dry`).
    A function that does not ask ``__torch_function__`` comes to ``__torch_dispatch__``, and is refused.
    """

    #: a Program
    program: Any
    value: Value
    local: Tensor | None
    memory: Alias
    #: for isinstance(x, nn.Parameter)
    _is_param = False
    #: which tensor of a dry pass it is
    label = ""

    @staticmethod
    def of(program: Any, value: Value, local: Tensor | None, memory: Alias) -> Field:
        # Without values it needs a gradient: so does then what an autograd Function makes of it.
        made = Field() if local is not None else torch.empty(0, requires_grad=True).as_subclass(Field)
        made.program, made.value, made.local, made.memory = program, value, local, memory
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args and type(args[0]) is Field else _some_field((args, kwargs))
        return first.program.call(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _some_field((args, kwargs)).program.unknown(f"the operator {function}")

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.value.whole.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.value.whole.dtype if self.local is None else self.local.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.program.device  # type: ignore[no-any-return]

    def __iter__(self) -> Any:
        raise self.program.refused(
            "a loop over a tensor", "its first dimension is the batch", "chunk or split along channels"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Field({list(self.shape)}, {self.value.blocks and self.value.blocks.blocks})"

    def __format__(self, spec: str) -> str:
        return repr(self)


def _some_field(tree: Any) -> Field:
    given: list[Any] = []
    key_of(tree, given)
    return next(one for one in given if type(one) is Field)


def key_of(one: Any, given: list[Any]) -> Any:
    """What a rule may know of an argument, to be compared; its tensors go to ``given``."""
    kind = type(one)
    if kind is Field:
        given.append(one)
        return one.value
    if one is None or kind is int or kind is str:
        return one
    if isinstance(one, (tuple, list)):
        return kind, *[key_of(each, given) for each in one]
    if isinstance(one, float):
        return kind, one.hex()  # 0.0 == -0.0, and NaN is not NaN
    if isinstance(one, Tensor):
        given.append(one)
        return kind, one.shape, one.stride(), one.dtype, one.requires_grad
    if kind is slice:
        return kind, key_of(one.start, given), key_of(one.stop, given), key_of(one.step, given)
    if kind is dict:
        return kind, *[(name, key_of(each, given)) for name, each in one.items()]
    return kind, one
