"""`shard`: the parallel module of an unmodified torch module."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from commengine import CartesianGrid, Decomposition
from commengine.torch_private import private
from tplayers.fields.layer import FieldLayer, check_geometry

from .field import Field
from .functions import call
from .layers import is_dropout, rule_of
from .program import EXTRAS, Place, Program, Tensors
from .values import Refused

#: the samples of the pass without values: a number that is no size of a network's own
_BATCH = 7
#: calls that are not replaced
_CALLS = (nn.Module.__call__, nn.ParameterList.__call__, nn.ParameterDict.__call__)


def shard(
    module: nn.Module, grid: CartesianGrid, decomposition: Decomposition, *, channels: int | None = None
) -> ShardedModule:
    """Return the parallel module of ``module``, an unmodified torch module on a field [batch, channels, *space].

    grid, decomposition: the ranks, and the blocks of the field that goes in. channels: those of that field; None: what
        the first convolution or norm of the module takes.

    The result takes this rank's block, and computes what ``module`` computes from the whole field: its values, the
    gradients of its input, and those of the parameters, which have the same bits on all ranks. Its state dict has the
    names and shapes of ``module``'s, and it begins with copies of its values; ``module`` stays as it is.

    The forward runs as it is written, on tensors that have the shape of the whole field and hold this rank's block.
    Here it runs without values, for training and for evaluation. docs/fields.md says which layers and functions are
    taken. All else raises ValueError, with the same text on all ranks: it names the part, its place in the module and
    the line, and what would do in its place. A setting of the module that changes later has no effect.

    Every rank calls it with the same module and arguments. It sends nothing; the first forward compares program and
    parameters of the ranks.
    """
    check_geometry("shard", grid, decomposition)
    if rule_of(module) is not None:
        why = "it is a layer; use the layer of tplayers, or nn.Sequential(layer)"
        raise Refused(f"shard cannot take {type(module).__name__} alone: {why}")
    _require_plain(module)
    layers = [one for one in module.modules() if isinstance(one, FieldLayer)]
    try:
        own = copy.deepcopy(module, {id(one): one for one in layers})
    except Exception as error:
        raise ValueError(f"shard cannot copy {type(module).__name__}: {error}") from error
    some = next((one for one in own.parameters() if one.is_floating_point()), torch.empty(0))
    shape = (_BATCH, channels or _first_channels(own), *decomposition.shape)
    program = Program(grid, decomposition, call)
    _stand_ins(program, own)
    passes = []
    for training in (False, True):
        for one in program.root.modules():
            if id(one) in program.paths:
                one.training = training
        passes.append((_dry(program, own, shape, some), "\n".join(program.log), program.constants))
    (output, text, constants), (_, other, others) = passes
    if text != other or not all(map(torch.equal, constants, others)):
        why = "its forward does other things in training than in evaluation, besides its layers"
        instead = "use layers, such as nn.Dropout, or shard a module for each"
        raise Refused(f"shard cannot take {type(module).__name__}: {why}; {instead}")
    return ShardedModule(own, program, shape[1], output, text)


class ShardedModule(FieldLayer):
    """What `shard` returns.

    input: the decomposition of the field that goes in. output: that of the result along its axes of space; None for a
    result that every rank has; the same structure of these for a result of several tensors.

    forward: x [batch, channels, *local block], of the parameters' dtype -> this rank's block of the result, or all of
    it. Collective over the grid; every rank must run the backward. A result that every rank has is that of
    `FieldGlobalPool`: ranks that compute one loss from it, each the same, divide it by ``grid.size``.
    """

    def __init__(self, own: nn.Module, program: Program, channels: int, output: Any, text: str) -> None:
        """own: the module with torch's layers. text: what the forward does."""
        super().__init__(program.grid, program.field, channels)
        self.program, self.output = text, output
        new = {id(own.get_submodule(path)): layer for path, layer in program.replaced.items()}
        for parent in list(own.modules()):
            for name, child in parent._modules.items():
                if id(child) in new:
                    parent._modules[name] = new[id(child)]
        # A module of the user may have the name of an attribute here, such as "output".
        for table in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[table] = own.__dict__[table]
        self.__dict__["_program"] = program
        self._modules[EXTRAS] = program.extras.train(own.training)
        self.training = own.training

    def forward(self, x: Tensor) -> Any:
        self.check(x)
        program: Program = self.__dict__["_program"]
        program.begin(x.device)
        found = program.root(program.input(x, (*x.shape[:2], *self.input.shape), x.dtype))
        return private("tree_map")(lambda one: one.local if isinstance(one, Field) else one, found)


def _stand_ins(program: Program, own: nn.Module) -> None:
    """Give ``program`` a copy of ``own`` that runs: with a `Place` for each layer, and the tensors of ``own``.

    Its children may stand in lists and other attributes, too, so that the copy has them all; memory it needs none.
    """
    program.trained = set(map(id, own.parameters()))
    memo: dict[int, Any] = {id(one): one for one in (*own.parameters(), *own.buffers())}
    memo |= {id(one): copy.copy(one) for one in own.modules() if isinstance(one, FieldLayer)}
    program.root = copy.deepcopy(own, memo)
    program.paths = {}
    for path, one in program.root.named_modules():
        source = own.get_submodule(path)
        if one is source:  # within a layer of tplayers
            continue
        program.paths[id(one)], rule = path, rule_of(source)
        if rule is not None:
            one.forward = Place(program, path, source, rule, is_dropout(source))
        for table in ("_parameters", "_buffers"):
            one.__dict__[table] = Tensors(program, path, source.__dict__[table])


def _random_states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), torch.get_rng_state().numpy().tobytes(), kind, np.asarray(keys).tobytes(), *rest


def _dry(program: Program, own: nn.Module, shape: tuple[int, ...], like: Tensor) -> Any:
    """Run the forward without values, of the dtype and device of ``like``. Returns the blocks of its results."""
    title, drawn = f"the forward of {type(own).__name__}", _random_states()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            program.begin(like.device, dry=True)
            found = program.root(program.input(None, shape, like.dtype))
    except Refused:
        raise
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        raise program.refused(
            title, f"{type(error).__name__}: {text}", "functions and methods of torch that need no values", error=error
        ) from error
    if _random_states() != drawn:
        raise program.refused(title, "it draws random numbers", "nn.Dropout")
    for path, one in program.root.named_modules():
        kept = {name: value for name, value in vars(one).items() if name != "_modules"}
        if any(isinstance(value, Field) for value in private("tree_leaves")(kept)):
            why = "its forward keeps a tensor as an attribute, which holds a block of a field; return the tensor"
            raise Refused(f"shard cannot take {type(one).__name__} {path!r}: {why}")
    for one in private("tree_leaves")(found):
        if not isinstance(one, Field) and getattr(one, "requires_grad", hasattr(one, "__dict__")):
            raise program.refused(title, f"it returns a {type(one).__name__}", "tensors, in tuples, lists or dicts")
    return private("tree_map")(lambda one: one.value.blocks if isinstance(one, Field) else None, found)


def _require_plain(module: nn.Module) -> None:
    """Refuse what would be lost: hooks, parametrizations and parameters without a shape."""
    if type(module).train is not nn.Module.train:
        why = "its train() is its own, and would be lost; use a layer's"
        raise Refused(f"shard cannot take {type(module).__name__}: {why}")
    for path, one in module.named_modules():
        where = f"{type(one).__name__} {path!r}"
        if any(getattr(one, f"_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")):
            raise Refused(f"shard cannot take {where}: it has hooks, which would be lost; remove them")
        if "forward" in vars(one) or type(one).__call__ not in _CALLS:
            raise Refused(f"shard cannot take {where}: its forward or its call is replaced, and would be lost")
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
