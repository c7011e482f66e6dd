"""What a rank does for one call of the forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from commengine import Decomposition
from tplayers.fields.layer import FieldLayer
from tplayers.fields.pad import FieldPad
from tplayers.fields.pool import FieldMaxPool
from tplayers.movement.operators import repartition

from .field import Alias, Field
from .values import Refused, Value, rebuilt, shaped, storage_of

#: why a change of what others see is refused, and what to use instead
IN_PLACE = "it changes a parameter, a buffer or a copy in place", "the function that makes a new tensor"
#: dtypes of which float64 has every value
_EXACT = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32})


class LocalStep:
    """The work of a rank for one call: the functions of ``todo`` run one after the other, each with tensors before it.

    program: a Program. given: the tensors of the call. path, count: of the layer that is called, and the number of its
    call in this pass. others: whether tensors of the user's own are among the arguments.
    """

    def __init__(self, program: Any, given: list[Any], path: str, count: int, others: bool) -> None:
        self.program, self.grid, self.path, self.count, self.others = program, program.grid, path, count, others
        self.given = [self._known(one, index) for index, one in enumerate(given)]
        #: with the places of tensors among the arguments, if they are not in lists
        self.todo: list[tuple[Callable[..., Any], Any, dict[str, Any], list[tuple[int, int]] | None]] = []
        #: the name of a function that changes the first tensor
        self.writes, self._texts = "", list[str]()
        #: whether it changes not the values but the shape
        self.reshapes = False
        self.constants = {index for index, one in enumerate(given) if type(one) is not Field}
        #: what no further call may change in place: the one may be a view of the other in torch and a copy here
        self.frozen = [self.given[index].whole for index in self.constants]

    def _known(self, one: Tensor, index: int) -> Value:
        if isinstance(one, Field):
            whole = one.value.whole
            return replace(one.value, whole=whole.new_empty_strided(whole.shape, whole.stride()), index=index)
        if one.requires_grad:
            raise self.refused("a tensor that needs gradients", "it is no parameter of the module")
        return Value(shaped(one.shape, one.dtype), index=index)

    # What rules call --------------------------------------------------------------------------------------------------

    def emit(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Value, text: str = ""
    ) -> Value:
        """Add a call, of whose result ``value`` is known. text: what it is, the same on all ranks."""
        kinds = rebuilt((args, kwargs), torch.device, lambda one: one.type)  # ranks have devices of their own
        self._texts.append(text or f"{getattr(function, '__name__', function)}{kinds}")
        places = [(place, one.index) for place, one in enumerate(args) if isinstance(one, Value)]
        inner: list[Value] = []
        rebuilt((args, kwargs), Value, inner.append)
        self.todo.append((function, args, kwargs, places if len(inner) == len(places) else None))
        return replace(value, index=len(self.given) + len(self.todo) - 1)

    def through(self, layer: nn.Module, x: Value, value: Value) -> Value:
        """Emit a call of ``layer`` with ``x``.

        Layers of fields take real numbers. Those that copy points take booleans and short integers as such numbers,
        which have them exactly; any other call with such a field is refused.
        """
        given = x.whole.dtype
        if isinstance(layer, FieldLayer) and not given.is_floating_point:
            copies = isinstance(layer, FieldPad | FieldMaxPool) or getattr(layer, "mode", None) == "nearest"
            if not copies or given not in _EXACT:
                raise self.refused(
                    f"a field of {given}", f"{type(layer).__name__} needs real numbers", "x.double() before it"
                )
            exact = self.through(layer, self.cast(x, torch.float64), replace(value, whole=value.whole.double()))
            return self.cast(exact, given)
        if value.blocks is not None:
            self.program.blocks_of.setdefault(value.blocks.shape, value.blocks)
        return self.emit(layer, (x,), {}, value, f"{layer}({x})")

    def cast(self, x: Value, dtype: torch.dtype) -> Value:
        """``x`` in another dtype."""
        return self.emit(Tensor.to, (x, dtype), {}, replace(x, whole=x.whole.to(dtype)))

    def cut(self, x: Value, blocks: Decomposition, space: tuple[int, ...], whole: Tensor) -> Value:
        """``x`` as an operand for a field with these blocks and axes of space, of the whole shape ``whole``."""
        if x.blocks is not None:
            if x.space != space:
                raise self.refused("this function", "its fields have their axes of space in different dimensions")
            sizes = [
                blocks.blocks[axis] if x.shape[dim] == whole.shape[dim] else x.blocks.blocks[axis]
                for axis, dim in enumerate(space)
            ]
            target = Decomposition(tuple(sizes))
            if target == x.blocks:
                return x
            if not x.at_end:
                raise self.refused("this function", "its fields have different blocks, and channels are last")
            value = Value(shaped(x.shape, x.whole.dtype), target, space)
            text = f"Blocks({x}, {x.blocks.blocks} -> {target.blocks})"
            return self.emit(repartition, (x, self.grid.comm, x.blocks, target), {}, value, text)
        slices = blocks.slices(self.grid.coords)
        dims = {d: slices[n] for n, d in enumerate(space) if -d <= x.whole.dim() and x.shape[d] == whole.shape[d] > 1}
        return self.emit(_own_part, (x, dims), {}, x, f"own part of {x} {list(dims)}") if dims else x

    def refused(self, part: str, why: str, instead: str = "") -> Refused:
        return self.program.refused(part, why, instead)  # type: ignore[no-any-return]

    # What the program calls -------------------------------------------------------------------------------------------

    def finish(self, result: Any) -> None:
        """Take the ``result`` that a rule returned: a `Value`, several in a tuple or list, or a number."""
        self._kind = type(result)
        several = [one for one in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(one, Value)]
        self._number = None if several else result
        frozen = set(map(storage_of, self.frozen))
        fields = [one for one in reversed(self.given) if one.index not in self.constants]
        owners = {storage_of(one.whole): one.index for one in fields}
        self._freezes = [owners[place] for place in frozen if place in owners]
        self._results = []
        for one in several:
            place, value = storage_of(one.whole), self.program.known(one.whole, one.blocks, one.space)
            self._results.append((one.index, value, owners.get(place), place in frozen))

    def run(self, given: list[Any]) -> Any:
        """What the call returns for the tensors ``given``. Collective, as layers are."""
        program = self.program
        if self.writes and given[0].memory.frozen > self.reshapes:
            raise self.refused(self.writes, *IN_PLACE)
        for number in self._freezes:
            given[number].memory.frozen = given[number].memory.frozen or 1
        slots: list[Any] = []
        if program.dry:
            labels = [getattr(one, "label", "") for one in given]
            program.log.append(f"{len(program.log)}: {labels} {self.path} {'; '.join(self._texts)}")
            program.constants += [given[number] for number in sorted(self.constants)]
        else:
            slots += [one.local if type(one) is Field else one for one in given]
            for function, args, kwargs, places in self.todo:
                if places is None:
                    args, kwargs = rebuilt((args, kwargs), Value, lambda one: slots[one.index])
                else:
                    args = list(args)
                    for place, index in places:
                        args[place] = slots[index]
                slots.append(function(*args, **kwargs))
        found = []
        for index, value, owner, frozen in self._results:
            if index < len(given) or (self.writes and not self.reshapes):
                found.append(given[0 if self.writes else index])
                continue
            memory = Alias(frozen) if owner is None else given[owner].memory
            found.append(Field.of(program, value, slots[index] if slots else None, memory))
            if program.dry:
                found[-1].label = f"{len(program.log)}.{index}"
        if self.reshapes:
            given[0].value, given[0].local, found = found[0].value, found[0].local, [given[0]]
        return self._number if not found else found[0] if self._kind is Value else self._kind(found)


def _own_part(x: Tensor, dims: dict[int, slice]) -> Tensor:
    """This rank's part of a tensor that every rank has; dims: the parts of dimensions, counted from the end."""
    for dim, part in dims.items():
        x = x.narrow(dim, part.start, part.stop - part.start)
    return x
