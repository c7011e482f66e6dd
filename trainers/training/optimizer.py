"""Optimizer: AdamW over all parameters or over this rank's shard of them, and its state by global names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from commengine import Work
from tplayers import Placement

from .parameters import MOMENTS, FlatParameters, PlainParameters, Updated
from .reduction import GradientBuckets


class Optimizer:
    """AdamW with the gradients of ``gradients``, without decay on biases and norms (paper, section 4.2).

    Create it after the parameters are initialised, because it may replace their storage: parameters in half precision,
    and all parameters if the gradients are sharded, become views of flat buffers.

    A half-precision parameter is the rounded value of an fp32 master (Micikevicius et al. 2018, section 3.1). If the
    gradients are sharded, each rank of the data group updates its shard and all ranks gather the whole (ZeRO-1,
    Rajbhandari et al. 2020, section 5.1). The gather runs on the gradients' stream if there is one; therefore call
    `wait_for_parameters` before the parameters are read.

    updates: the steps done. Learning-rate schedules count these, not the skipped steps.
    """

    def __init__(
        self, gradients: GradientBuckets, *, weight_decay: float, betas: tuple[float, float], eps: float
    ) -> None:
        self.updates = 0
        self._data, self._stream = gradients.data, gradients.stream
        self._named, self._placements = gradients.named, gradients.placements
        self._owners = [
            FlatParameters(bucket.layout, bucket.reduced, gradients.data)
            if bucket.layout.flat
            else PlainParameters(bucket.layout)
            for bucket in gradients.buckets
        ]
        self._owner_of = {parameter: owner for owner in self._owners for parameter in owner.layout.names}
        self._steps = [_adamw(owner.updated, weight_decay, betas, eps) for owner in self._owners]
        self._gathers: list[Work] = []

    def step(self, rate: float) -> None:
        """One update with learning rate ``rate``. Collective over the data group if the gradients are sharded."""
        for owner, adamw in zip(self._owners, self._steps, strict=True):
            for group in adamw.param_groups:
                group["lr"] = rate
            adamw.step()
            if (gather := owner.publish(self._stream)) is not None:
                self._gathers.append(gather)
        self.updates += 1

    def wait_for_parameters(self) -> None:
        """Wait until all ranks have the parameters of the last step. Call it before a forward pass or a checkpoint."""
        for work in self._gathers:
            work.wait()
        self._gathers.clear()

    def local_state(self) -> Iterator[tuple[str, Tensor]]:
        """(Kind, tensor) of this rank's own state: "master", "exp_avg" and "exp_avg_sq", each stretch apart.

        "master" is what AdamW updates, also where it is the parameter itself.
        """
        for owner in self._owners:
            for one in owner.updated:
                yield from (("master", one.values), *one.moments.items())

    def unsharded(self) -> Iterator[tuple[str, Tensor]]:
        """(Name, tensor) of the state, named as by `tensors`, that every rank of the data group holds whole.

        There is none with ZeRO-1.
        """
        for owner in self._owners:
            if not owner.layout.sharded:
                for kind in owner.kinds:
                    for parameter, tensor in owner.tensors(kind, wanted=True):
                        yield f"{kind}.{owner.layout.names[parameter]}", tensor

    # Checkpoints ----------------------------------------------------------------------------------------------

    @property
    def masters(self) -> bool:
        """Whether there are fp32 masters of half-precision parameters."""
        return any(owner.layout.mixed for owner in self._owners)

    def described(self) -> dict[str, tuple[torch.dtype, Placement]]:
        """The dtype and placement of what `tensors` gives, by its names."""
        found = {}
        for kind in (*MOMENTS, "master"):
            for name, parameter in self._named.items():
                owner = self._owner_of.get(parameter)  # None: it is frozen
                if owner is not None and kind in owner.kinds:
                    found[f"{kind}.{name}"] = (owner.layout.state_dtype, self._placements[name])
        return found

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Name, tensor) of all state, on rank 0 of the data group; nothing on its other ranks.

        The names are exp_avg.NAME, exp_avg_sq.NAME, and master.NAME for half-precision parameters. Each tensor has its
        parameter's shape. Collective over the data group: every rank must exhaust it.

        A sharded bucket is gathered one kind of state at a time. A caller that drops each tensor before it takes the
        next keeps at most two such gathered buffers alive.
        """
        for owner in self._owners:
            for kind in owner.kinds:
                for parameter, tensor in owner.tensors(kind, wanted=self._data.rank == 0):
                    yield f"{kind}.{owner.layout.names[parameter]}", tensor

    def fill(self, kind: str, name: str, values: Tensor) -> None:
        """Set one kind of state of the parameter ``name`` on this rank. values: in the parameter's shape.

        kind: "exp_avg", "exp_avg_sq", or "master", which also sets the parameter.
        """
        parameter = self._named[name]
        with torch.no_grad():
            if (owner := self._owner_of.get(parameter)) is not None:
                owner.fill(kind, parameter, values)
            elif kind == "master":
                parameter.copy_(values)

    def set_updates(self, updates: int) -> None:
        """Go on as after ``updates`` steps."""
        self.updates = updates
        for adamw in self._steps:
            for state in adamw.state.values():
                state["step"].fill_(updates)


class _AdamW(torch.optim.AdamW):
    """torch's AdamW without the wrappers that guard it from torch.compile, which never sees it here.

    The wrappers import the compiler at their first call, which takes each rank a second at its start.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def _adamw(
    updated: Sequence[Updated], weight_decay: float, betas: tuple[float, float], eps: float
) -> torch.optim.AdamW:
    groups = [
        {"params": values, "weight_decay": weight_decay if decayed else 0.0}
        for decayed in (True, False)
        if (values := [one.values for one in updated if one.decayed == decayed])
    ]
    adamw = _AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
    for one in updated:
        step = torch.zeros((), dtype=torch.float32, device=one.values.device)
        adamw.state[one.values] = {"step": step, **one.moments}
    return adamw
