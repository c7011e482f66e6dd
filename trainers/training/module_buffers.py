"""ModuleBuffers: the buffers of a module, such as BatchNorm's running statistics, kept equal on all replicas."""

from __future__ import annotations

import zlib
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

    A module may put another tensor or None in a buffer's place, of equal shapes on all ranks (see `layouts`). A buffer
    that it adds later is not known here. ``groups`` are the buffers that travel together. Rank 0's values are those
    that count, as in PyTorch's DistributedDataParallel: a mean of equal values could be rounded, and would then change
    buffers that are constants.
    """

    def __init__(self, module: nn.Module, data: Communicator) -> None:
        self._data = data
        found: dict[Tensor, tuple[nn.Module, str]] = {}
        self._names: dict[tuple[nn.Module, str], str] = {}
        for prefix, owner in module.named_modules():
            for name, buffer in owner.named_buffers(recurse=False):
                found.setdefault(buffer, (owner, name))
                self._names[owner, name] = f"{prefix}.{name}" if prefix else name
        self.groups = together(list(found), list(found.values()))
        self._seen = [self._state(number) for number in range(len(self.groups))]
        self._now = list(self._seen)
        #: the layouts on which the ranks agreed last
        self._agreed = [self._described(number) for number in range(len(self.groups))]
        self._sizes = [(tensor.numel(), tensor.dtype) for tensor, _ in self._seen]

    def changed(self) -> list[int]:
        """The numbers of the groups that this rank has changed since the construction or `equalize`."""
        if self._data.size == 1:
            return []
        self._now = [self._state(number) for number in range(len(self.groups))]
        pairs = zip(self._seen, self._now, strict=True)
        return [number for number, (old, new) in enumerate(pairs) if not _same(*old, *new)]

    def layouts(self) -> list[tuple[int, int]]:
        """For each group a number of 20 bits, and its square: 0 with the sizes and dtypes on which the ranks agreed.

        The numbers of P ranks are equal if the square of their sum is P times the sum of their squares, because of the
        Cauchy-Schwarz inequality. Call `changed` before.
        """
        found = []
        for number, (tensor, _) in enumerate(self._now):
            layout = 0
            if (tensor.numel(), tensor.dtype) != self._sizes[number]:
                layout = zlib.crc32(repr(self._described(number)).encode()) % (1 << 20) or 1
            found.append((layout, layout**2))
        return found

    def replaced(self, numbers: Iterable[int]) -> str:
        """The buffers of these groups that have changed their shapes on this rank; all of them if none has."""
        said, every = [], []
        for number in numbers:
            for one, now, first in zip(self.groups[number], self._described(number), self._agreed[number], strict=True):
                every.append(self._names[one])
                if now != first:
                    said.append(f"{self._names[one]} is {now} here and was {first}")
        return "; ".join(said or every)

    def equalize(self, numbers: Iterable[int]) -> None:
        """Give the buffers of these groups the values that rank 0 has. Collective, with equal ``numbers``.

        Call `changed` before.
        """
        for number in numbers:
            if _separate(self.groups[number]):
                self._now[number] = self._state(number)
            flat, version = self._now[number]
            if version is not None:
                copy_from_rank_zero([flat], self._data)
                self._seen[number] = self._state(number)
            else:
                if flat.numel():
                    self._data.broadcast(flat)
                    if self._data.rank > 0:
                        _spread(flat, self._tensors(number))
                self._seen[number] = flat, None
            self._agree(number)

    def _agree(self, number: int) -> None:
        tensor, _ = self._seen[number]
        if (size := (tensor.numel(), tensor.dtype)) != self._sizes[number]:
            self._sizes[number], self._agreed[number] = size, self._described(number)

    def _tensors(self, number: int) -> list[Tensor]:
        buffers: list[Any] = [
            owner._buffers.get(name) for owner, name in self.groups[number]
        ]  # get_buffer takes longer
        return [buffer for buffer in buffers if buffer is not None]

    def _described(self, number: int) -> list[str]:
        found = (owner._buffers.get(name) for owner, name in self.groups[number])
        return ["None" if one is None else f"{one.dtype} {list(one.shape)}" for one in found]

    def _state(self, number: int) -> tuple[Tensor, int | None]:
        """A large buffer and PyTorch's number of its changes in place; or a copy of small ones, and None.

        The number would not do for the small ones, because PyTorch's batch norm does not count its changes.
        """
        tensors = self._tensors(number)
        if not tensors:
            return torch.empty(0, dtype=torch.uint8, device="cpu"), None
        if len(self.groups[number]) == 1 and tensors[0].numel() >= LARGE:
            return tensors[0], tensors[0]._version
        return torch.cat([tensor.reshape(-1) for tensor in tensors]), None


def _same(old: Tensor, before: int | None, new: Tensor, now: int | None) -> bool:
    """Whether two states are equal. Those of a device count as different: comparing would make the host wait."""
    if now is not None:
        return old is new and before == now
    return new.is_cpu and old.dtype == new.dtype and bool(old.equal(new))


def separate_memory(module: nn.Module) -> None:
    """Give expanded buffers memory of their own: several elements in one place cannot be written to one by one."""
    _separate((owner, name) for owner in module.modules() for name in owner._buffers)


def _separate(places: Iterable[tuple[nn.Module, str]]) -> bool:
    found = False
    for owner, name in places:
        buffer = owner._buffers.get(name)
        if buffer is not None and any(n > 1 and s == 0 for n, s in zip(buffer.shape, buffer.stride(), strict=True)):
            owner._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
            found = True
    return found


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
