"""Optimizer: AdamW over all parameters or over this rank's shard of them, and its state by global names.

The owners of a bucket's values and state (parameters, fp32 masters, AdamW's moments) are `PlainParameters`, which
leaves the parameters where they are, and `FlatParameters`, which makes them views of one buffer, so that casting and
gathering them is one call. Both have the same methods. The gradients belong to
`trainers.training.reduction.GradientBuckets`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from commengine import Communicator, Stream, Work
from tplayers import Placement

from .layout import BucketLayout, new_buffer
from .reduction import GradientBuckets

#: AdamW's tensors that are placed as their parameter is
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Updated:
    """Values that AdamW updates as one tensor. ``values.grad`` is their gradient, of the same dtype and shape.

    decayed: with weight decay. moments: by their names in `MOMENTS`, of the shape of ``values``.
    """

    values: Tensor
    decayed: bool
    moments: Mapping[str, Tensor]


class PlainParameters:
    """Parameters in single or double precision that AdamW updates where they are, and their moments.

    data: the ranks that hold the same parameters.
    """

    kinds = MOMENTS

    def __init__(self, layout: BucketLayout, data: Communicator) -> None:
        self.layout, self.data = layout, data
        self._of = {
            parameter: Updated(parameter, treatment.decayed, {kind: torch.zeros_like(parameter) for kind in MOMENTS})
            for parameter, treatment in layout.treatments.items()
        }
        #: what AdamW updates
        self.updated = list(self._of.values())

    def publish(self) -> None:
        """Do nothing: AdamW has updated the parameters themselves."""

    def tensors(self, kind: str, *, wanted: bool) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter and its state ``kind``, in its shape. wanted: whether this rank needs them."""
        if wanted:
            yield from ((parameter, one.moments[kind]) for parameter, one in self._of.items())

    def fill(self, kind: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set state ``kind`` of ``parameter``; "master" is the parameter itself. values: in the parameter's shape."""
        (parameter if kind == "master" else self._of[parameter].moments[kind]).copy_(values)


class FlatParameters:
    """Parameters that are views of one buffer [size], and this rank's share of their masters and moments.

    gradient: the reduced gradient of this rank's share (`BucketLayout.mine`). data: the ranks that hold the same
    parameters. stream: of ``data``, on which the updated parameters are gathered; None for none.

    The parameters must have their values already. The masters of half-precision parameters copy them, in fp32; of other
    parameters they are the parameters themselves.
    """

    def __init__(self, layout: BucketLayout, gradient: Tensor, data: Communicator, stream: Stream | None) -> None:
        self.layout, self.data, self._stream = layout, data, stream
        self.kinds = (*MOMENTS, "master") if layout.mixed else MOMENTS
        self.parameters = new_buffer(layout.size, layout.dtype, layout.device, data)
        for parameter in layout.names:
            view = layout.view(self.parameters, parameter)
            view.copy_(parameter.detach())
            parameter.data = view
        self._mine = self.parameters[layout.mine]
        master = self._mine.float() if layout.mixed else self._mine
        self.state = {"master": master} | {kind: torch.zeros_like(master) for kind in MOMENTS}
        #: what AdamW updates: stretches of this rank's masters
        self.updated: list[Updated] = []
        for treatment, stretch in layout.stretches():
            values = master[stretch]
            values.grad = gradient[stretch]
            moments = {kind: self.state[kind][stretch] for kind in MOMENTS}
            self.updated.append(Updated(values, treatment.decayed, moments))

    def publish(self) -> Work | None:
        """Cast this rank's masters into the parameters; if sharded, start to gather the parameters of all ranks.

        Collective over ``data`` if sharded. Returns the gather's Work: the parameters are whole when it is done.
        """
        if self.layout.mixed:
            self._mine.copy_(self.state["master"])
        return self.data.all_gather(self.parameters, self._mine, stream=self._stream) if self.layout.sharded else None

    def tensors(self, kind: str, *, wanted: bool) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter and its whole state ``kind``, in its shape, on rank 0 of ``data``; nothing elsewhere.

        wanted: true on rank 0 only. Collective over ``data`` if sharded: every rank must exhaust it.
        """
        whole = self.state[kind]
        if self.layout.sharded and self.data.size > 1:
            mine = whole
            whole = mine.new_empty(self.layout.size if wanted else 0)
            self.data.gather(whole if wanted else None, mine)
        if wanted:
            yield from ((parameter, self.layout.view(whole, parameter)) for parameter in self.layout.names)

    def fill(self, kind: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set this rank's share of state ``kind`` of ``parameter``; with "master", set the whole parameter too.

        values: of the whole parameter, in its shape.
        """
        layout = self.layout
        start = layout.starts[parameter]
        low, high = max(start, layout.mine.start), min(start + parameter.numel(), layout.mine.stop)
        if low < high:
            kept = self.state[kind][low - layout.mine.start : high - layout.mine.start]
            kept.copy_(layout.elements(parameter, values)[low - start : high - start])
        if kind == "master":
            layout.view(self.parameters, parameter).copy_(values)


class Optimizer:
    """AdamW with the gradients of ``gradients``, without decay on biases and norms (paper, section 4.2).

    Create it after the parameters are initialised, because it may replace their storage: parameters in half precision,
    and all parameters if the gradients are sharded, become views of flat buffers.

    A half-precision parameter is the rounded value of an fp32 master (Micikevicius et al. 2018, section 3.1). If the
    gradients are sharded, each of the ranks that hold a parameter updates its shard, and all gather the whole (ZeRO-1,
    Rajbhandari et al. 2020, section 5.1). The gather runs on a bucket's stream if there is one; therefore call
    `wait_for_parameters` before the parameters are read.

    updates: the steps done. Learning-rate schedules count these, not the skipped steps.
    """

    def __init__(
        self, gradients: GradientBuckets, *, weight_decay: float, betas: tuple[float, float], eps: float
    ) -> None:
        self.updates = 0
        self._named, self._placements = gradients.named, gradients.placements
        self._owners = [
            FlatParameters(bucket.layout, bucket.reduced, bucket.data, bucket.stream)
            if bucket.layout.flat
            else PlainParameters(bucket.layout, bucket.data)
            for bucket in gradients.buckets
        ]
        self._owner_of = {parameter: owner for owner in self._owners for parameter in owner.layout.names}
        self._steps = [_adamw(owner.updated, weight_decay, betas, eps) for owner in self._owners]
        self._gathers: list[Work] = []

    def step(self, rate: float) -> None:
        """One update with learning rate ``rate``. Collective over the replicas if the gradients are sharded."""
        for owner, adamw in zip(self._owners, self._steps, strict=True):
            for group in adamw.param_groups:
                group["lr"] = rate
            adamw.step()
            if (gather := owner.publish()) is not None:
                self._gathers.append(gather)
        self.updates += 1

    def wait_for_parameters(self) -> None:
        """Wait for the parameters of the last step, which the replicas gather if the gradients are sharded.

        Each rank calls it before it reads the parameters: before a forward pass or a checkpoint. It is not collective,
        and returns at once if nothing is on its way. On a CUDA stream torch's current stream waits, and not the host.
        Raises the error of a gather that failed, as `Work.wait` does.
        """
        for work in self._gathers:
            work.wait()
        self._gathers.clear()

    def unsharded(self) -> Iterator[tuple[str, Tensor]]:
        """(Name, tensor) of the state, named as by `tensors`, that every rank with the parameter holds whole.

        There is none with ZeRO-1.
        """
        return self._state(everywhere=True)

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
        """(Name, tensor) of all state, on the first of the ranks that hold the parameter; nothing on the others.

        The names are exp_avg.NAME, exp_avg_sq.NAME, and master.NAME for half-precision parameters. Each tensor has its
        parameter's shape. Collective over these ranks: each must exhaust it.

        A sharded bucket is gathered one kind of state at a time. A caller that drops each tensor before it takes the
        next keeps at most two such gathered buffers alive.
        """
        return self._state()

    def _state(self, *, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The state on the first rank that holds a parameter. everywhere: that which each of them holds whole."""
        for owner in self._owners:
            for kind in () if everywhere and owner.layout.sharded else owner.kinds:
                for parameter, tensor in owner.tensors(kind, wanted=everywhere or owner.data.rank == 0):
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
