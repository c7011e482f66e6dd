"""The trace of a module, in which each call becomes the parallel one as soon as torch.fx sees it.

A `Traced` stands for each tensor of the module's forward. Its sizes are those of the whole field, as numbers, so a
size in arithmetic or in a condition is right on every rank; sizes of the batch stay open. A call of a layer or function
comes to `FieldTracer.create_proxy`, which gives it to a rule (`layers`, `functions`). The rule emits nodes of the
parallel program, or refuses: there is no way past the rules.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Scope, ScopeContextManager

from commengine import CartesianGrid, Decomposition
from tplayers.fields.layer import FieldLayer
from tplayers.fields.pad import FieldPad
from tplayers.fields.pool import FieldMaxPool

from . import parts
from .traced import HERE, TORCH, Traced
from .values import BATCH, Number, Refused, Value, traced

#: dtypes of which float64 has every value
_EXACT = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32})

#: where the modules without parameters stand that the user's module does not have
EXTRAS = "_between"


def _modes() -> tuple[Any, ...]:
    """What blocks such as torch.no_grad and torch.autocast change."""
    kinds = ("cpu", "cuda")
    cast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *cast


#: a rule for a call of a layer: (tracer, layer, its path in the module, the tensor that goes in), and an output_size
LayerRule = Callable[..., Any]
#: a rule for all functions and methods: (tracer, kind of node, target, args, kwargs)
FunctionRule = Callable[["FieldTracer", str, Any, tuple[Any, ...], dict[str, Any]], Any]


class FieldTracer(fx.Tracer):
    """Traces ``root`` on a field. rules: of a layer, None for a module that is traced through; of functions."""

    proxy_buffer_attributes = True

    def __init__(
        self,
        grid: CartesianGrid,
        field: Decomposition,
        channels: int,
        dtype: torch.dtype,
        rule_of: Callable[[nn.Module], LayerRule | None],
        function_rule: FunctionRule,
    ) -> None:
        super().__init__()
        self.grid, self.field, self.channels, self.dtype = grid, field, channels, dtype
        self._rule_of, self._function_rule = rule_of, function_rule
        self.values: dict[fx.Node, Any] = {}
        #: the layers that replace those of the module, by path; and the other ones
        self.layers: dict[str, nn.Module] = {}
        self.extras: dict[str, nn.Module] = {}
        self.constants: list[Tensor] = []
        #: storages that nothing may change in place: of parameters, and of what the parallel program has copied
        self.frozen: set[int] = set()
        #: the blocks in which fields of a shape were first seen
        self.blocks_of: dict[tuple[int, ...], Decomposition] = {field.shape: field}
        self.batch: Traced | None = None
        self._input: Traced | None = None
        self._in_rule = False
        self._modes = _modes()

    # What torch.fx calls ----------------------------------------------------------------------------------------------

    def proxy(self, node: fx.Node) -> Traced:
        return Traced(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._rule_of(m) is not None

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        return attr_val if self._in_rule else super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._in_rule:
            return forward(*args, **kwargs)
        self._require_modes()
        rule = self._rule_of(m)
        if rule is None:
            return super().call_module(m, forward, args, kwargs)
        path = self.path_of_module(m)
        given = [*args, *kwargs.values()]
        sized = isinstance(m, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))  # they take output_size
        if len(given) not in (1, 1 + sized) or not isinstance(given[0], Traced):
            raise self.refused(type(m).__name__, "it needs one tensor of the module's forward", path=path)
        with ScopeContextManager(self.scope, Scope(path, type(m))), self._rule():
            return rule(self, m, path, *given)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Any = None,
    ) -> Any:
        if kind == "placeholder":
            return self._placeholder(target, args)
        if kind == "get_attr":
            return self._tensor(target)
        self._require_modes()
        with self._rule():
            return self._function_rule(self, kind, target, self.known(args), self.known(kwargs))

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        return super().create_arg(self.known(a) if isinstance(a, Tensor) else a)

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise self.refused(
            "control flow that depends on values",
            "torch.fx follows one path, and ranks could take different ones",
            "torch.where, or a condition on shapes or settings",
        )

    def iter(self, obj: fx.Proxy) -> Any:
        raise self.refused("a loop over a tensor", "its first dimension is the batch", "chunk or split along channels")

    # What rules call --------------------------------------------------------------------------------------------------

    def known(self, args: Any) -> Any:
        """``args`` with a `Traced` in place of each tensor, which is a parameter, a buffer or a constant."""
        if isinstance(args, fx.Proxy):
            if type(args) is not Traced:
                _ = args.node  # an attribute of a tensor: a rule decides about it
            return args
        if isinstance(args, Tensor):
            for path, one in (*self.root.named_parameters(), *self.root.named_buffers()):
                if one is args:
                    return self._tensor(path)
            return self._constant(args)
        if isinstance(args, (tuple, list)):
            return type(args)(map(self.known, args)) if type(args) in (tuple, list) else tuple(map(self.known, args))
        if isinstance(args, dict):
            return {name: self.known(one) for name, one in args.items()}
        return args

    def emit(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Traced:
        """Add a node to the parallel program, of which ``value`` is known."""
        if isinstance(value, Value) and value.blocks and any(n % BATCH == 0 for n in value.whole.shape[1:]):
            raise self.refused("a field", f"a dimension is a multiple of {BATCH}, which stands for the batch here")
        made = super().create_proxy(kind, target, args, kwargs)
        self.values[made.node] = value
        return made  # type: ignore[return-value]

    def through(self, layer: nn.Module, x: Traced, value: Value, path: str | None = None) -> Traced:
        """Emit a call of ``layer`` with ``x``. path: where it replaces a layer; None: it is a module more.

        Layers of fields take real numbers. Those that copy points take booleans and short integers as such numbers,
        which have them exactly; any other call with such a field is refused.
        """
        given = x.value.whole.dtype
        if isinstance(layer, FieldLayer) and not given.is_floating_point:
            copies = isinstance(layer, FieldPad | FieldMaxPool) or getattr(layer, "mode", None) == "nearest"
            if not copies or given not in _EXACT:
                raise self.refused(
                    f"a field of {given}",
                    f"{type(layer).__name__} needs real numbers",
                    "x.double() before it",
                    path=path,
                )
            found = self.through(layer, self.cast(x, torch.float64), replace(value, whole=value.whole.double()), path)
            return self.cast(found, given)
        if path is None or path in self.layers:
            if self.layers.get(path or "") is not layer:
                # Masks of dropout depend on its name, and the number of cuts on the ranks: so each kind counts its own.
                kind = type(layer).__name__
                name = f"{kind}{sum(type(one).__name__ == kind for one in self.extras.values())}"
                self.extras[name] = layer
                path = f"{EXTRAS}.{name}"
        else:
            self.layers[path] = layer
        if value.blocks is not None:
            self.blocks_of.setdefault(value.blocks.shape, value.blocks)
        return self.emit("call_module", path, (x,), {}, value)

    def cast(self, x: Traced, dtype: torch.dtype) -> Traced:
        """``x`` in another dtype."""
        value = replace(x.value, whole=x.value.whole.to(dtype))
        return self.emit("call_method", "to", (x, dtype), {}, value)

    def cut(self, x: Traced, blocks: Decomposition, space: tuple[int, ...], whole: Tensor) -> Traced:
        """``x`` as an operand for a field with these blocks and axes of space, of the whole shape ``whole``."""
        value: Value = x.value
        own = value.whole
        if value.blocks is not None:
            if value.space != space:
                raise self.refused("this function", "its fields have their axes of space in different dimensions")
            sizes = [
                blocks.blocks[axis] if own.shape[dim] == whole.shape[dim] else value.blocks.blocks[axis]
                for axis, dim in enumerate(space)
            ]
            target = Decomposition(tuple(sizes))
            if target == value.blocks:
                return x
            if not value.at_end:
                raise self.refused("this function", "its fields have different blocks, and channels are last")
            return self.through(parts.Blocks(self.grid, value.blocks, target), x, Value(own, target, space))
        dims = {d: axis for axis, d in enumerate(space) if -d <= own.dim() and own.shape[d] == whole.shape[d] > 1}
        if not dims:
            return x
        return self.through(parts.OwnPart(self.grid, blocks, dims), x, Value(own))

    def refused(
        self, part: str, why: str, instead: str = "", *, path: str | None = None, error: Exception | None = None
    ) -> Refused:
        """The error for a part of the module: its name, its place, the reason, and what would do.

        error: one that was raised at that place; None: it is where the trace stands.
        """
        path = self.scope.module_path if path is None else path
        line = self._line(error)
        said = f"shard cannot take {part}{f' in {path!r}' if path else ''}{f' ({line})' if line else ''}: {why}"
        return Refused(f"{said}; use {instead}" if instead else said)

    @staticmethod
    def _line(error: Exception | None) -> str:
        """The line of the user's module that made the call."""
        if error is None:
            frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
        else:
            frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)][::-1]
        for file, line in frames:
            if file.startswith(HERE) and file.endswith("shard.py"):
                break
            if not file.startswith((TORCH, HERE, "<")):
                return f"{file}:{line}"
        return ""

    # ------------------------------------------------------------------------------------------------------------------

    def _require_modes(self) -> None:
        if _modes() != self._modes:
            raise self.refused(
                "a block of torch.no_grad, torch.autocast or their like within the forward",
                "torch.fx does not see it",
                "x.detach(), or the block around the whole module",
            )

    @contextlib.contextmanager
    def _rule(self) -> Iterator[None]:
        """Within the block modules are what they are: torch.fx replaces their attributes and calls while it traces."""
        before, self._in_rule = self._in_rule, True
        try:
            yield
        finally:
            self._in_rule = before

    def _placeholder(self, name: str, args: tuple[Any, ...]) -> Any:
        if self._input is not None and args:
            return args[0]  # the default of an argument that a sharded module does not have
        if self._input is not None or name.startswith("*"):
            raise self.refused(f"the argument {name!r} of forward", "a sharded module takes one tensor, the field")
        whole = traced((BATCH, self.channels, *self.field.shape), self.dtype)
        axes = len(self.field.shape)
        self._input = self.emit("placeholder", name, args, {}, Value(whole, self.field, tuple(range(-axes, 0))))
        self.batch = self.emit("call_method", "size", (self._input, 0), {}, Number(BATCH))
        return self._input

    def _tensor(self, path: str) -> Traced:
        """A parameter or a buffer of the module."""
        parent, _, name = path.rpartition(".")
        with self._rule():
            module = self.root.get_submodule(parent)
        tensor = module._parameters.get(name, module._buffers.get(name))
        if tensor is None:
            raise self.refused(f"the attribute {path!r}", "it is not a parameter or buffer")
        value = Value(traced(tensor.shape, tensor.dtype))
        self.frozen.add(value.storage)
        found = self.emit("get_attr", path, (), {}, value)
        if isinstance(tensor, nn.Parameter):
            with self._rule():
                found = self.through(parts.SummedGradient(self.grid), found, value)
        return found

    def _constant(self, tensor: Tensor) -> Traced:
        if tensor.requires_grad:
            raise self.refused("a tensor that needs gradients", "it is not a parameter of the module")
        value = Value(traced(tensor.shape, tensor.dtype))
        self.frozen.add(value.storage)
        self.constants.append(tensor)
        return self.emit("get_attr", f"{EXTRAS}.constant{len(self.constants) - 1}", (), {}, value)
