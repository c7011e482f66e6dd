"""`shard`: the parallel module of an unmodified torch module."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from commengine import CartesianGrid, Decomposition
from commengine.torch_private import private, watched_recomputation
from tplayers.fields.layer import FieldLayer, check_geometry

from .functions import call
from .layers import rule_of
from .traced import Traced
from .tracer import EXTRAS, FieldTracer
from .values import Refused, Value


def shard(
    module: nn.Module, grid: CartesianGrid, decomposition: Decomposition, *, channels: int | None = None
) -> ShardedModule:
    """Return the parallel module of ``module``, an unmodified torch module on a field [batch, channels, *space].

    grid, decomposition: the ranks, and the blocks of the field that goes in. channels: those of that field; None: what
        the first convolution or norm of the module takes.

    The result takes this rank's block, and computes what ``module`` computes from the whole field: its values, the
    gradients of its input, and those of the parameters, which have the same bits on all ranks. Its state dict has the
    names and shapes of ``module``'s, and it begins with copies of its values; ``module`` stays as it is.

    torch.fx traces the module's forward for training and for evaluation. docs/fields.md says which layers and functions
    are taken. All else raises ValueError, with the same text on all ranks: it names the part, its place in the module
    and the line, and what would do in its place. It is no part of the trace what the forward does beside tensors, and a
    setting of the module that changes later has no effect.

    Every rank calls it with the same module and arguments. It sends nothing; the first forward compares program and
    parameters of the ranks.
    """
    check_geometry("shard", grid, decomposition)
    if rule_of(module) is not None:
        raise Refused(
            f"shard cannot take {type(module).__name__} alone: it is a layer; use the layer of tplayers, or "
            "nn.Sequential(layer)"
        )
    _require_plain(module)
    layers = [one for one in module.modules() if isinstance(one, FieldLayer)]
    try:
        own = copy.deepcopy(module, {id(one): one for one in layers})
    except Exception as error:
        raise ValueError(f"shard cannot copy {type(module).__name__}: {error}") from error
    some = next((one for one in own.parameters() if one.is_floating_point()), None)
    dtype = torch.get_default_dtype() if some is None else some.dtype
    channels = channels or _first_channels(own)
    modes = {path: one.training for path, one in own.named_modules()}
    try:
        programs = []
        for training in (False, True):
            for one in own.modules():
                one.training = training
            programs.append(_traced(FieldTracer(grid, decomposition, channels, dtype, rule_of, call), own))
    finally:
        for path, one in own.named_modules():  # layers of tplayers are the user's own
            one.training = modes[path]
    (tracer, graph, text), (second, _, other) = programs
    constants = zip(tracer.constants, second.constants, strict=False)
    if text != other or not all(a.shape == b.shape and bool((a == b).all()) for a, b in constants):
        raise Refused(
            f"shard cannot take {type(module).__name__}: its forward does other things in training than in evaluation, "
            "besides its layers; use layers, such as nn.Dropout, or shard a module for each"
        )
    return ShardedModule(own, tracer, graph, text, modes)


class ShardedModule(FieldLayer):
    """What `shard` returns.

    input: the decomposition of the field that goes in. output: that of the result along its axes of space; None for a
    result that every rank has; the same structure of these for a result of several tensors.

    forward: x [batch, channels, *local block], of the parameters' dtype -> this rank's block of the result, or all of
    it. Collective over the grid; every rank must run the backward. A result that every rank has is that of
    `FieldGlobalPool`: ranks that compute one loss from it, each the same, divide it by ``grid.size``.
    """

    def __init__(
        self, own: nn.Module, tracer: FieldTracer, graph: fx.Graph, program: str, modes: dict[str, bool]
    ) -> None:
        """modes: of the modules of ``own``, for training or not, by path."""
        super().__init__(tracer.grid, tracer.field, tracer.channels)
        self.program = program
        result = graph.output_node().args[0]
        self.output = fx.node.map_arg(result, lambda node: _blocks_of(tracer.values[node]))  # type: ignore[assignment]
        self._graph = graph
        _replace(own, tracer.layers)
        # A module of the user may have the name of an attribute here, such as "output".
        self._modules.update(own._modules)
        self._parameters.update(own._parameters)
        self._buffers.update(own._buffers)
        self._non_persistent_buffers_set |= own._non_persistent_buffers_set
        between = nn.ModuleDict(tracer.extras)
        for number, constant in enumerate(tracer.constants):
            between.register_buffer(f"constant{number}", constant, persistent=False)
        self._modules[EXTRAS] = between
        for path, one in self.named_modules():
            one.training = modes.get(path, own.training)

    def forward(self, x: Tensor) -> Any:
        self.check(x)
        return _Run(self, self._graph).run(x)


class _Run(fx.Interpreter):
    """Runs a program on a module, whose parts it finds by their names among its modules, parameters and buffers."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self.extra_traceback = False

    def fetch_attr(self, target: str) -> Any:
        found: Any = self.module
        for name in target.split("."):
            tables = (found._modules, found._parameters, found._buffers)
            found = next(table[name] for table in tables if name in table)
        return found

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.fetch_attr(target)(*args, **kwargs)


def _blocks_of(value: Any) -> Any:
    return value.blocks if isinstance(value, Value) else None


def _replace(own: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Put ``layers`` in the places of those of ``own``: in all of them, and keep the tied parameters tied."""
    tied: dict[int, list[str]] = {}
    for path, parameter in own.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(path)
    new = {id(own.get_submodule(path)): layer for path, layer in layers.items()}
    for parent in list(own.modules()):
        for name, child in parent._modules.items():
            if id(child) in new:
                parent._modules[name] = new[id(child)]
    for first, *others in tied.values():
        for path in others:
            parent_path, _, name = path.rpartition(".")
            own.get_submodule(parent_path)._parameters[name] = own.get_parameter(first)


def _random_states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), torch.get_rng_state().numpy().tobytes(), kind, np.asarray(keys).tobytes(), *rest


def _tensors(module: nn.Module) -> dict[str, int]:
    """Which tensors are the module's own parameters and buffers."""
    return {name: id(one) for name, one in (*module._parameters.items(), *module._buffers.items())}


@contextlib.contextmanager
def _no_functions() -> Iterator[None]:
    """Within the block autograd Functions and recomputation refuse what is traced: a trace would lose them."""
    before = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for one in (*args, *kwargs.values()):
            if isinstance(one, Traced):
                raise one.tracer.refused(f"the autograd Function {cls.__name__}", "a trace does not see its backward")
        return before.__func__(cls, *args, **kwargs)

    def recomputed(args: list[Any]) -> None:
        for one in args:
            if isinstance(one, Traced):
                raise one.tracer.refused("torch.utils.checkpoint", "a trace does not see where it begins and ends")

    with watched_recomputation(recomputed):
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            torch.autograd.Function.apply = before  # type: ignore[method-assign]


def _traced(tracer: FieldTracer, module: nn.Module) -> tuple[FieldTracer, fx.Graph, str]:
    """The tracer, the parallel program that it made of ``module``, and a text that describes it."""
    drawn, before = _random_states(), {path: _tensors(one) for path, one in module.named_modules()}
    try:
        with _no_functions():
            graph = tracer.trace(module)
    except Refused:
        raise
    except Exception as error:
        raise tracer.refused(
            f"the forward of {type(module).__name__}",
            f"torch.fx cannot trace it ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})",
            "functions and methods of torch, and one sample in tensors of your own: the batch's size has no value here",
            error=error,
        ) from error
    if _random_states() != drawn:
        raise tracer.refused(f"the forward of {type(module).__name__}", "it draws random numbers", "nn.Dropout")
    for path, one in module.named_modules():
        kept = private("tree_leaves")({name: value for name, value in vars(one).items() if name != "_modules"})
        if any(isinstance(value, fx.Proxy) for value in kept) or before[path] != _tensors(one):
            raise Refused(
                f"shard cannot take {type(one).__name__} {path!r}: its forward keeps a tensor as an attribute, which a "
                "trace does not see; return the tensor"
            )
    return tracer, graph, "\n".join([str(graph), *(f"{name}: {one}" for name, one in tracer.extras.items())])


def _require_plain(module: nn.Module) -> None:
    """Refuse what torch.fx would not see: hooks, parametrizations and parameters without a shape."""
    if type(module).train is not nn.Module.train:
        raise Refused(
            f"shard cannot take {type(module).__name__}: its train() is its own, and would be lost; use a layer's"
        )
    for path, one in module.named_modules():
        where = f"{type(one).__name__} {path!r}"
        hooks: list[Callable[..., Any]] = [
            *one._forward_hooks.values(), *one._forward_pre_hooks.values(), *one._backward_hooks.values(),
            *one._backward_pre_hooks.values(),
        ]  # fmt: skip
        if hooks:
            raise Refused(f"shard cannot take {where}: it has hooks, which a trace does not see; remove them")
        if "forward" in vars(one) or type(one).__call__ is not nn.Module.__call__:
            raise Refused(f"shard cannot take {where}: its forward or its call is replaced, which a trace does not see")
        if parametrize.is_parametrized(one):
            raise Refused(f"shard cannot take {where}: it is parametrized; use parametrize.remove_parametrizations")
        if any(is_lazy(p) for p in (*one.parameters(False), *one.buffers(False))):
            raise Refused(f"shard cannot take {where}: its shape is open; run it once before")


def _first_channels(module: nn.Module) -> int:
    for one in module.modules():
        for name in ("in_channels", "num_features", "num_channels"):
            if isinstance(getattr(one, name, None), int):
                return int(getattr(one, name))
    raise ValueError("shard: no layer of the module says how many channels the field has: give channels=")
