"""What the calls of a sharded module's forward become.

The forward runs as it was written, on `Field` tensors. Each call of a function or of a layer comes to `Program.call` or
`Program.call_layer`. A rule (`functions`, `layers`) makes a `LocalStep` of it: what a rank does with its blocks, and
what is then known of the results. Or it refuses: there is no way past the rules. A step is kept for further calls of
the same kind. When a module is sharded its forward runs without values (`dry`): then steps are made, and none is run.
"""

from __future__ import annotations

import sys
import traceback
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from commengine import CartesianGrid, Decomposition
from commengine.torch_private import private
from tplayers.fields.layer import replicated

from .field import Alias, Field, key_of
from .step import LocalStep
from .values import Refused, Value, rebuilt, shaped

#: the folders of torch and of this room
_TORCH, _HERE = str(Path(torch.__file__).parent), str(Path(__file__).parent)
#: where the modules without parameters stand that the user's module does not have
EXTRAS = "_between"
#: the steps that are kept
_MOST = 20_000


def _modes() -> tuple[Any, ...]:
    """What blocks such as torch.no_grad and torch.autocast change."""
    kinds = ("cpu", "cuda")
    cast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *cast


class Program:
    """Of one sharded module. function_rule: for all functions: (step, function, its arguments)."""

    #: the module whose forward runs: a copy, with a `Place` for each layer; the paths of its modules; its parameters
    root: nn.Module
    paths: dict[int, str]
    trained: set[int]

    def __init__(self, grid: CartesianGrid, field: Decomposition, function_rule: Callable[..., Any]) -> None:
        self.grid, self.field, self._function_rule = grid, field, function_rule
        #: the layers of fields, by the path of the layer that they replace, or words for a call, and what tells them
        #: from others there; those that have no place in the user's module; and the others by path
        self.layers: dict[tuple[str, Any], nn.Module] = {}
        self.extras, self.replaced = nn.ModuleDict(), dict[str, nn.Module]()
        #: the blocks in which fields of a shape were first seen
        self.blocks_of: dict[tuple[int, ...], Decomposition] = {field.shape: field}
        self._steps, self._values = dict[Any, LocalStep](), dict[Any, Value]()
        self.begin(torch.device("cpu"), dry=True)

    def begin(self, device: torch.device, *, dry: bool = False) -> None:
        """Begin a pass of the forward. log, constants: what a dry one does, for a comparison."""
        self.device, self.dry, self.modes = device, dry, _modes()
        if len(self._steps) > _MOST:  # of batches of many sizes
            self._steps.clear()
            self._values.clear()
        self.counts, self.log, self.constants = dict[str, int](), list[str](), list[Tensor]()

    def input(self, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Field:
        """The field that goes in. x: this rank's block."""
        space = tuple(range(-len(self.field.shape), 0))
        return Field.of(self, self.known(shaped(shape, dtype), self.field, space), x, Alias(0))

    def everywhere(self, one: Tensor, label: str) -> Field:
        """A parameter or buffer of the module."""
        value, trained = self.known(shaped(one.shape, one.dtype)), isinstance(one, nn.Parameter)
        if trained and not self.dry:
            one = replicated(self.grid.comm, one)[0]
        field = Field.of(self, value, None if self.dry else one, Alias(2))
        field._is_param, field.label = trained, label
        return field

    def known(self, whole: Tensor, blocks: Decomposition | None = None, space: tuple[int, ...] = ()) -> Value:
        """The one `Value` with these facts."""
        key = whole.shape, whole.stride(), whole.dtype, blocks, space
        if key not in self._values:
            self._values[key] = Value(whole, blocks, space)
        return self._values[key]

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call of a function or method returns."""
        given: list[Any] = []
        key = function, *[key_of(one, given) for one in args], key_of(kwargs, given) if kwargs else None
        return self._done(key, given, self._function_rule, function, args, kwargs)

    def call_layer(self, place: Place, args: tuple[Any, ...]) -> Any:
        """What a call of a layer of the module returns."""
        given: list[Any] = []
        count = self.counts[place.path] = self.counts.get(place.path, 0) + 1
        key = place.path, key_of(args, given), count if place.counted else 0
        return self._done(key, given, place.rule, place.layer, place.path, *args, count=count)

    def _done(self, key: Any, given: list[Any], rule: Callable[..., Any], *args: Any, count: int = 0) -> Any:
        """What ``rule`` makes of ``args``, whose tensors are ``given``. count: the number of the call of a layer."""
        step = self._steps.get(key)
        if step is None or step.others:
            others = any(type(one) is not Field for one in given)
            for index, one in enumerate(given):  # a parameter may stand in a list of the user's
                if type(one) is nn.Parameter and (id(one) in self.trained or not self.dry):
                    given[index] = self.everywhere(one, "")
        if step is None or self.dry or self.modes[0] != torch.is_grad_enabled():
            self._require_surroundings()
        if step is None:
            with private("_DisableFuncTorch")():
                step = LocalStep(self, given, args[1] if count else "", count, others)
                values = iter(step.given)
                step.finish(rule(step, *rebuilt(args, Tensor, lambda _: next(values))))
            self._steps[key] = step
        return step.run(given)

    def layer(self, place: str, kind: Any, make: Callable[[], nn.Module], *, kept: bool = False) -> nn.Module:
        """The layer for ``place`` and ``kind``, which ``make`` makes. kept: it has parameters, or masks."""
        if (place, kind) not in self.layers:
            if kept and not self.dry:
                raise self.refused("this layer", "its call depends on the batch: shard looked with another batch")
            made = make() if kept else make().to(self.device)
            if place in self.paths.values() and place not in self.replaced:
                self.replaced[place] = made
            else:
                # Masks of dropout depend on its name, and the number of cuts on the ranks: so each kind counts its own.
                name = type(made).__name__
                self.extras[f"{name}{sum(type(one).__name__ == name for one in self.extras.values())}"] = made
            self.layers[place, kind] = made
        return self.layers[place, kind]

    # Errors -----------------------------------------------------------------------------------------------------------

    def refused(self, part: str, why: str, instead: str = "", *, error: Exception | None = None) -> Refused:
        """The error for a part of the module: its name, its place, the reason, and what would do.

        error: one that was raised at that place; None: it is where the program stands.
        """
        path = line = ""
        for frame, number in _frames(error):
            file, module = frame.f_code.co_filename, frame.f_locals.get("self")
            if not path and isinstance(module, nn.Module):
                path = self.paths.get(id(module), "")
            if not line and not file.startswith((_TORCH, _HERE, "<")):
                line = f"{file}:{number}"
        text = f"shard cannot take {part}{f' in {path!r}' if path else ''}{f' ({line})' if line else ''}: {why}"
        return Refused(f"{text}; use {instead}" if instead else text)

    def unknown(self, part: str, instead: str = "") -> Refused:
        """The error for what is not among the known functions."""
        why = "it is not among those that are known to be right on split fields"
        return self.refused(part, why, instead)

    def _require_surroundings(self) -> None:
        """Refuse what would do something with the call that a rule does not see."""
        for frame, _ in _frames():
            kind = frame.f_locals.get("cls") if frame.f_code.co_name == "apply" else None
            if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):  # torch up to 2.13
                raise self.refused(f"the autograd Function {kind.__name__}", "its backward is that of a block")
            if frame.f_code.co_filename == checkpoint.__file__:
                raise self.refused("torch.utils.checkpoint", "it does not see all that the ranks compute")
        if _modes() != self.modes:
            raise self.refused(
                "an autograd Function, or a block of torch.no_grad, torch.autocast or their like, within the forward",
                "layers of fields compute their gradients themselves",
                "x.detach(), or the block around the whole module",
            )


def _frames(error: Exception | None = None) -> Iterator[tuple[FrameType, int]]:
    """Frames and lines within the module's forward, the innermost first: of ``error``, or of now."""
    walk = traceback.walk_stack(sys._getframe()) if error is None else [*traceback.walk_tb(error.__traceback__)][::-1]
    for frame, line in walk:
        if frame.f_code.co_filename == f"{_HERE}/shard.py":
            return
        yield frame, line


@dataclass(eq=False)
class Place:
    """The forward of a layer of the module: a rule decides what it is. counted: each call of it is another one."""

    program: Program
    path: str
    layer: nn.Module
    rule: Callable[..., Any]
    counted: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        sized = isinstance(self.layer, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))  # an output_size
        if len(given) not in (1, 1 + sized) or not isinstance(given[0], Field):
            raise self.program.refused(type(self.layer).__name__, "it needs one tensor of the module's forward")
        return self.program.call_layer(self, given)


class Tensors(UserDict[str, Any]):
    """The parameters or buffers of a module, as its forward sees them: tensors that every rank has."""

    def __init__(self, program: Program, path: str, tensors: dict[str, Any]) -> None:
        self._program, self._path, self.data = program, path, tensors

    def __getitem__(self, name: str) -> Field | None:
        one = self.data[name]
        return None if one is None else self._program.everywhere(one, f"{self._path}.{name}")

    def __setitem__(self, name: str, value: Any) -> None:
        raise self._program.refused(f"an assignment to {name!r}", "the forward keeps a tensor", "its result")
