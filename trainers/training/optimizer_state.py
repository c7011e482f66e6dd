"""OptimizerState: the state of any PyTorch optimizer by the global names of its parameters, for checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from commengine import Communicator
from commengine.rank_zero import broadcast_json, gather_json, on_every_rank
from tplayers import Placement, placements

from .sharded_optimizer import LISTS, ShardedOptimizer


class OptimizerState:
    """The state of ``optimizer``, which updates parameters of ``module``; with `ShardedOptimizer` that of all ranks.

    A tensor is named KIND.PARAMETER, such as "exp_avg.conv.weight". One of its parameter's shape is placed as the
    parameter is; others must belong to a parameter that every rank holds whole.

    world, data: the groups of `DataParallel`. Construction is collective over ``world``. Raises UsageError, on all
    ranks, if the optimizer has another module's parameters, or state that is neither a tensor nor a number.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, world: Communicator, data: Communicator
    ) -> None:
        self.optimizer, self._data = optimizer, data
        self._sharded = isinstance(optimizer, ShardedOptimizer)
        self._local: torch.optim.Optimizer = optimizer.local if isinstance(optimizer, ShardedOptimizer) else optimizer
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.placements = placements(module)
        self._numbers: set[str] = set()
        self._mine = on_every_rank(world, lambda: dict(self._found()))
        #: name -> dtype, shape on a rank, the rank of the data group that has it, and whether it is a Python number
        self._all: dict[str, tuple[str, list[int], int, bool]] = {
            name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data.rank, name in self._numbers)
            for name, tensor in self._mine.items()
        }
        if self._sharded:
            merged = {name: one for part in gather_json(data, self._all) for name, one in part.items()}
            self._all = broadcast_json(data, merged)

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        for parameter in _parameters(self.optimizer):
            if parameter not in self.names:
                raise ValueError(f"the optimizer has a parameter {list(parameter.shape)} that the module has not")
            name = self.names[parameter]
            for kind, value in self._local.state.get(parameter, {}).items():
                if isinstance(value, int | float):  # the dtype holds it exactly
                    self._numbers.add(f"{kind}.{name}")
                    real = torch.float64 if isinstance(value, float) else torch.int64
                    dtype = torch.bool if isinstance(value, bool) else real
                    value = torch.tensor(value, dtype=dtype, device="cpu")
                if isinstance(value, Tensor):
                    self._place(name, value.shape)
                    yield f"{kind}.{name}", value
                elif value is not None:
                    kind_of = type(self._local).__name__
                    raise ValueError(
                        f"{kind_of} keeps {kind!r} of {name} as {type(value).__name__}: it cannot be saved"
                    )

    def _place(self, name: str, shape: Collection[int], *, whole: bool = False) -> Placement:
        """The placement of a state of parameter ``name``. whole: ``shape`` is the global shape, not that on a rank."""
        placed = self.placements[name]
        if tuple(shape) == (placed.shape if whole else placed.local_shape):
            return placed
        if placed.sharded and len(shape) > 0:
            raise ValueError(f"the state of {name} has shape {list(shape)}, and the parameter is split over ranks")
        return Placement(tuple(shape))

    # Saving: `trainers.checkpoints.checkpoint_writer` ---------------------------------------------------------------

    def described(self) -> dict[str, tuple[torch.dtype, Placement]]:
        """The dtype and placement of what `tensors` gives, by its names."""
        return {
            name: (getattr(torch, dtype), self._place(name.partition(".")[2], shape))
            for name, (dtype, shape, *_) in self._all.items()
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Name, tensor) of all state, on rank 0 of the data group; nothing on its other ranks.

        Collective over the data group: every rank must exhaust it.
        """
        for name, (dtype, shape, owner, _) in self._all.items():
            if self._data.rank == 0:
                tensor = self._mine[name] if owner == 0 or not self._sharded else self._received(dtype, shape, owner)
                yield name, tensor
            elif self._sharded and owner == self._data.rank:
                self._data.send(self._mine[name].to(self._data.device).contiguous(), 0)

    def _received(self, dtype: str, shape: list[int], owner: int) -> Tensor:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._data.device)
        self._data.recv(tensor, owner)
        return tensor

    def settings(self) -> dict[str, Any]:
        """The optimizer's kind and groups, and the shapes of its state, as JSON types."""
        groups = [
            {name: _plain(name, value) for name, value in group.items() if name not in LISTS}
            | {"params": [self.names[parameter] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        shapes = {name: list(placed.shape) for name, (_, placed) in self.described().items()}
        numbers = [name for name, (*_, number) in self._all.items() if number]
        return {"kind": type(self._local).__name__, "groups": groups, "state": shapes, "numbers": numbers}

    # Loading ------------------------------------------------------------------------------------------------------

    def wanted(self, settings: Mapping[str, Any]) -> tuple[dict[str, Placement], set[str]]:
        """The placements of all saved state by name, and the names that this rank needs. settings: as saved.

        Raises ValueError if it is that of another optimizer.
        """
        kind, groups = type(self._local).__name__, self.optimizer.param_groups
        if settings["kind"] != kind:
            raise ValueError(f"the state is that of {settings['kind']}, the optimizer is {kind}")
        ours = [[self.names[parameter] for parameter in group["params"]] for group in groups]
        theirs = [group["params"] for group in settings["groups"]]
        if ours != theirs:
            raise ValueError("the saved optimizer has other parameters, or has them in other groups or another order")
        placed = {name: self._place(name.partition(".")[2], s, whole=True) for name, s in settings["state"].items()}
        mine = {self.names[parameter] for parameter in _parameters(self._local)}
        return placed, {name for name in placed if name.partition(".")[2] in mine}

    def fill(self, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Set groups and state. settings: as saved. tensors: those that `wanted` names."""
        numbers = {self.names[parameter]: number for number, parameter in enumerate(_parameters(self._local))}
        python = set(settings.get("numbers", ()))
        state: dict[int, dict[str, Any]] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition(".")
            state.setdefault(numbers[name], {})[kind] = tensor.item() if key in python else tensor
        groups = []
        for group, mine, saved in zip(
            self.optimizer.param_groups, self._local.param_groups, settings["groups"], strict=True
        ):
            options = {name: _like(group.get(name), value) for name, value in saved.items() if name != "params"}
            group.update(options)
            groups.append({**options, "params": [numbers[self.names[parameter]] for parameter in mine["params"]]})
        self._local.load_state_dict({"state": state, "param_groups": groups})
        self.optimizer.state = self._local.state


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _plain(name: str, value: Any) -> Any:
    """An option of a group as a JSON type."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(name, one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"the optimizer's option {name} is a {type(value).__name__}: it cannot be saved")


def _like(old: Any, saved: Any) -> Any:
    """A saved option as the type that the optimizer uses."""
    if isinstance(old, Tensor):
        return torch.full_like(old, saved)
    return tuple(saved) if isinstance(old, tuple) else saved
