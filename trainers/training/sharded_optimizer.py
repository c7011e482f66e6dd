"""ShardedOptimizer: any optimizer that treats parameters separately, with its state spread over the data group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from commengine import Communicator

from .layout import ALIGNMENT, in_other_orders, lies_as, new_buffer, put_back, rounded_up, viewed_as

#: PyTorch's optimizers whose update of a parameter depends on that parameter and its gradient alone
SEPARATE = frozenset({
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
})  # fmt: skip


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer ``kind``, each of whose parameters is updated, and has its state, on one rank of ``data`` only.

    This is ZeRO-1 (Rajbhandari et al. 2020, section 5.1) by whole parameters, so that it works for every optimizer that
    treats them separately. Every rank has all gradients; after a step the owners broadcast the new values. The update
    and the state of a rank are about 1 / ``data.size`` of the whole; not less than that of the largest parameter.

    params: parameters or groups of them, as for ``kind``, in the same order on every rank. options: of ``kind``.
    separate: ``kind`` is not one of PyTorch's, and treats parameters separately; else ValueError.

    Construction and `step` are collective. Construction makes the parameters views of flat buffers; one that lies in
    another memory order on another rank becomes contiguous. A program may put other memory in a parameter's place
    later, as ``module.to(memory_format=...)`` does: the next `step` copies its values into the view, and puts the view
    back with its strides. ``param_groups`` has all parameters on every rank, so learning-rate schedulers and gradient
    scalers work as with ``kind``; ``state`` has this rank's parameters only. A group cannot be added later.

    With several ranks construction raises CollectiveError on all of them if a parameter is sparse or has elements that
    share memory. `step` raises RuntimeError if a parameter has another dtype, shape or device than before, because its
    place in the buffer does not fit it any more.
    """

    def __init__(
        self, params: Iterable[Any], kind: type[torch.optim.Optimizer], data: Communicator, *, separate: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        of_torch = kind.__module__.startswith("torch.optim")
        if not separate and not (of_torch and kind.__name__ in SEPARATE):
            raise ValueError(
                f"{kind.__name__} is not known to treat parameters separately, so its state cannot be sharded; those "
                f"that are: {', '.join(sorted(SEPARATE))}. separate=True says that it does"
            )
        self._built = False
        super().__init__(params, {})
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        owners = _owners([parameter.numel() for parameter in every], data.size)
        self._data = data
        #: the rank of the data group that updates a parameter
        self.owner = dict(zip(every, owners, strict=True))
        self._flat, self._views = _flattened(self.owner, data)
        #: the optimizer of this rank's parameters; its groups are those of all, without the other ranks' parameters
        self.local = kind([{**group, **self._mine(group)} for group in self.param_groups], **options)
        for group, mine in zip(self.param_groups, self.local.param_groups, strict=True):
            group.update({name: value for name, value in mine.items() if name not in LISTS})
        self.defaults = self.local.defaults
        self.state = self.local.state
        self._built = True

    def _mine(self, group: dict[str, Any]) -> dict[str, Any]:
        """The lists of a group that name parameters, with this rank's parameters only."""
        chosen = [n for n, parameter in enumerate(group["params"]) if self.owner[parameter] == self._data.rank]
        return {name: [group[name][n] for n in chosen] for name in LISTS if name in group}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters, and get the others'. Collective over the data group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._put_back()
        for group, mine in zip(self.param_groups, self.local.param_groups, strict=True):
            mine.update({name: value for name, value in group.items() if name not in LISTS})
        self.local.step()
        self.publish()
        return loss

    def _put_back(self) -> None:
        """Make each parameter a view of its buffer again, because `publish` sends and receives the buffers.

        Each rank does this without the others: the places in the buffers are those of the construction.
        """
        for parameter, view, address in self._views:
            if not put_back(parameter, view, address):
                raise RuntimeError(
                    f"ShardedOptimizer: a parameter is {_described(parameter)} now, and was {_described(view)} when "
                    "the optimizer was made; convert the module before that"
                )
            _lay_out_gradient(parameter)

    def publish(self) -> None:
        """Give all ranks the values that the owners have. Collective over the data group."""
        for owner, flat in self._flat:
            self._data.broadcast(flat, owner)
        torch.autograd.graph.increment_version([p for p, owner in self.owner.items() if owner != self._data.rank])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse, but in the construction: the parameters have been distributed."""
        if self._built:
            raise RuntimeError("ShardedOptimizer: the parameters are distributed when it is made; make a new one")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Refuse: a rank has a part only. ``DataParallel.save`` writes the whole."""
        raise RuntimeError("ShardedOptimizer: each rank has a part of the state; DataParallel.save writes the whole")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse: a rank has a part only. ``DataParallel.load`` reads it."""
        raise RuntimeError("ShardedOptimizer: each rank has a part of the state; DataParallel.load reads it")


#: the entries of a group that have one element for each parameter
LISTS = ("params", "param_names")


def _owners(sizes: list[int], ranks: int) -> list[int]:
    """The rank of each size: the largest first, each to the rank that has least."""
    owners, loads = [0] * len(sizes), [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += sizes[number]
    return owners


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device.type}"


def _lay_out_gradient(parameter: nn.Parameter) -> None:
    """Lay the gradient out as ``parameter`` lies now: torch's fused optimizers take their elements in memory order."""
    grad = parameter.grad
    if grad is not None and grad.layout is torch.strided and not lies_as(grad, parameter):
        parameter.grad = torch.empty_like(parameter.detach()).copy_(grad.detach())


def _flattened(
    owner: dict[nn.Parameter, int], data: Communicator
) -> tuple[list[tuple[int, Tensor]], list[tuple[nn.Parameter, Tensor, int]]]:
    """Make the parameters views of flat buffers, one for each owner, dtype and device. Collective.

    Returns the buffers: (owner, buffer); and the views: (parameter, view, its address).
    """
    if data.size == 1:
        return [], []
    together: dict[tuple[int, torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter, rank in owner.items():
        together.setdefault((rank, parameter.dtype, parameter.device), []).append(parameter)
    names = {str(number): parameter for number, parameter in enumerate(owner)}
    apart = {names[name] for name in in_other_orders(names, data)}
    buffers, views = [], []
    for (rank, dtype, device), parameters in together.items():
        sizes = [rounded_up(parameter.numel(), ALIGNMENT) for parameter in parameters]
        flat = new_buffer(sum(sizes), dtype, device, data)
        for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):
            part = part[: parameter.numel()]
            view = part.view(parameter.shape) if parameter in apart else viewed_as(part, parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            views.append((parameter, view, view.data_ptr()))
        buffers.append((rank, flat))
    return buffers, views
