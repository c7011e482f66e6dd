"""The buffers of a module under `DataParallel`, kept equal on all replicas, and copies of rank 0's values."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from commengine import Communicator
from commengine.torch_private import private

#: elements from which on a tensor is not copied together with others
LARGE = 1 << 16


class ModuleBuffers:
    """The buffers of ``module``, which the ranks of the data group ``data`` change apart, each from its own samples.

    A module may put another tensor or None in a buffer's place, of equal shapes on all ranks (see `layout`). A buffer
    that it adds later is not known here. Rank 0's values are those that count, as in PyTorch's DistributedDataParallel:
    a mean of equal values could be rounded, and would then change buffers that are constants.
    """

    def __init__(self, module: nn.Module, data: Communicator) -> None:
        self._data = data
        found: dict[Tensor, tuple[nn.Module, str, str]] = {}
        for prefix, owner in module.named_modules():
            for name, buffer in owner.named_buffers(recurse=False):
                found.setdefault(buffer, (owner, name, f"{prefix}.{name}" if prefix else name))
        self._places = list(found.values())
        self._shapes = self._first = self._now()
        self._layout = zlib.crc32(repr(self._shapes).encode())
        self.tensors()

    def _now(self) -> list[tuple[torch.Size, torch.dtype] | None]:
        buffers = [owner._buffers.get(name) for owner, name, _ in self._places]  # get_buffer takes longer
        return [None if one is None else (one.shape, one.dtype) for one in buffers]

    def layout(self) -> int:
        """A number that is equal on all ranks if their buffers have equal shapes and dtypes."""
        if (now := self._now()) != self._shapes:
            self._shapes, self._layout = now, zlib.crc32(repr(now).encode())
        return self._layout

    def replaced(self) -> str:
        """The buffers that have other shapes than at the construction on this rank; all of them if none has."""
        pairs = zip(self._places, self._now(), self._first, strict=True)
        said = [
            f"{name} is {_described(now)} here and was {_described(old)}"
            for (*_, name), now, old in pairs
            if now != old
        ]
        return "; ".join(said or [name for *_, name in self._places])

    def tensors(self) -> list[Tensor]:
        """The buffers that there are, each in memory in which its elements can be written to one by one."""
        found = []
        for owner, name, _ in self._places:
            buffer = owner._buffers.get(name)
            if buffer is None:
                continue
            if any(n > 1 and s == 0 for n, s in zip(buffer.shape, buffer.stride(), strict=True)):  # it is expanded
                owner._buffers[name] = buffer = buffer.clone(memory_format=torch.contiguous_format)
            found.append(buffer)
        return found

    def equalize(self) -> None:
        """Give the buffers the values that rank 0 has. Collective, with equal `layout`."""
        if self._places:
            copy_from_rank_zero(self.tensors(), self._data)


def _described(state: tuple[torch.Size, torch.dtype] | None) -> str:
    return "None" if state is None else f"{state[1]} {list(state[0])}"


def copy_from_rank_zero(tensors: Sequence[Tensor], comm: Communicator) -> None:
    """Copy rank 0's values into each of ``tensors``. Collective, with the same shapes and dtypes on every rank."""
    if comm.size == 1:
        return
    for some in _together([tensor.detach() for tensor in tensors]):
        flat = torch.cat([tensor.reshape(-1) for tensor in some])
        comm.broadcast(flat)
        if comm.rank > 0:
            parts = torch.split(flat, [tensor.numel() for tensor in some])
            private("_foreach_copy_")(some, [part.view_as(one) for part, one in zip(parts, some, strict=True)])


def _together(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups: small ones of one dtype and device together, each large one alone."""
    large: list[list[Tensor]] = []
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() >= LARGE:
            large.append([tensor])
        else:
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return [*small.values(), *large]
