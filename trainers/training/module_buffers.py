"""ModuleBuffers: the buffers of a module, such as BatchNorm's running statistics, kept equal on all replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from commengine import Communicator

#: elements from which on a tensor is not copied together with others
LARGE = 1 << 16

T = TypeVar("T")


class ModuleBuffers:
    """The buffers of ``module``, which the ranks of the data group ``data`` change apart, each from its own samples.

    A module may put another tensor in a buffer's place; one that it adds later is not known here. ``groups`` are the
    buffers that travel together. Rank 0's values are those that count, as in PyTorch's DistributedDataParallel: a mean
    of equal values could be rounded, and would then change buffers that are constants.
    """

    def __init__(self, module: nn.Module, data: Communicator) -> None:
        self._data = data
        found: dict[Tensor, tuple[nn.Module, str]] = {}
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                found.setdefault(buffer, (owner, name))
        self.groups = together(list(found), list(found.values()))
        self._seen = [self._state(number) for number in range(len(self.groups))]
        self._now = list(self._seen)

    def changed(self) -> list[int]:
        """The numbers of the groups that this rank has changed since the construction or `equalize`."""
        if self._data.size == 1:
            return []
        self._now = [self._state(number) for number in range(len(self.groups))]
        pairs = zip(self._seen, self._now, strict=True)
        return [number for number, (old, new) in enumerate(pairs) if not _same(*old, *new)]

    def equalize(self, numbers: Iterable[int]) -> None:
        """Give the buffers of these groups the values that rank 0 has. Collective, with equal ``numbers``.

        Call `changed` before.
        """
        for number in numbers:
            flat, version = self._now[number]
            if version is not None:
                copy_from_rank_zero([flat], self._data)
                self._seen[number] = self._state(number)
                continue
            self._data.broadcast(flat)
            if self._data.rank > 0:
                _spread(flat, self._tensors(number))
            self._seen[number] = flat, None

    def _tensors(self, number: int) -> list[Tensor]:
        buffers: list[Any] = [owner._buffers[name] for owner, name in self.groups[number]]  # get_buffer takes longer
        return buffers

    def _state(self, number: int) -> tuple[Tensor, int | None]:
        """A large buffer and PyTorch's number of its changes in place; or a copy of small ones, and None.

        The number would not do for the small ones, because PyTorch's batch norm does not count its changes.
        """
        tensors = self._tensors(number)
        if tensors[0].numel() >= LARGE:
            return tensors[0], tensors[0]._version
        return torch.cat([tensor.reshape(-1) for tensor in tensors]), None


def _same(old: Tensor, before: int | None, new: Tensor, now: int | None) -> bool:
    """Whether two states are equal. Those of a device count as different: comparing would make the host wait."""
    if now is not None:
        return old is new and before == now
    return new.is_cpu and bool(old.equal(new))


def copy_from_rank_zero(tensors: Sequence[Tensor], comm: Communicator) -> None:
    """Copy rank 0's values into each of ``tensors``. Collective, with the same shapes and dtypes on every rank."""
    if comm.size == 1:
        return
    for some in together(tensors, [tensor.detach() for tensor in tensors]):
        flat = torch.cat([tensor.reshape(-1) for tensor in some])
        comm.broadcast(flat)
        if comm.rank > 0:
            _spread(flat, some)


def together(tensors: Sequence[Tensor], items: Sequence[T]) -> list[list[T]]:
    """The ``items`` of ``tensors`` in groups: small tensors of one dtype and device together, each large one alone."""
    large: list[list[T]] = []
    small: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    for tensor, item in zip(tensors, items, strict=True):
        if tensor.numel() >= LARGE:
            large.append([item])
        else:
            small.setdefault((tensor.dtype, tensor.device), []).append(item)
    return [*small.values(), *large]


def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy ``flat``, the values of ``tensors`` one after the other, into them."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    with torch.no_grad():
        torch._foreach_copy_(list(tensors), [part.view_as(one) for part, one in zip(parts, tensors, strict=True)])
