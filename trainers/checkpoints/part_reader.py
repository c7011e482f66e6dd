"""This rank's part of a global tensor, read from where the whole tensor is stored, in as few bytes as is fast."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tplayers import Placement

#: bytes that are read at once where they do not go to their place directly: they stay in a core's second cache
BLOCK = 1 << 20

#: bytes; where a rank's rows in the file are shorter, it reads the rows of all ranks and drops those of the others
SHORT_ROW = 2 << 10


class ByteSource(Protocol):
    """The bytes of a global tensor that is stored somewhere, in row-major order."""

    def read(self, target: memoryview, start: int) -> None:
        """Fill the bytes of ``target`` from byte ``start`` of the global tensor on."""

    def announce(self, start: int, size: int) -> None:
        """Say that many short parts of the ``size`` bytes from ``start`` on are read next."""


@dataclass(frozen=True)
class FileBytes:
    """The bytes of an open file from ``begin`` on, as a `ByteSource`. file: a descriptor. path: for errors."""

    file: int
    path: Path
    begin: int

    def read(self, target: memoryview, start: int) -> None:
        """See `ByteSource`. Raises ValueError, naming the file, where it ends too early."""
        left, start = target, self.begin + start
        while left:
            count = os.preadv(self.file, [left], start)
            if not count:
                raise ValueError(f"{self.path}: ends at byte {start}, while it is read")
            start, left = start + count, left[count:]

    def announce(self, start: int, size: int) -> None:
        """See `ByteSource`. Without it a file that is not in memory is slow, because each short read waits for it."""
        start += self.begin
        try:
            os.preadv(self.file, [bytearray(1)], start, os.RWF_NOWAIT)
        except OSError:  # the byte is not in memory, or the file system cannot say so
            with contextlib.suppress(OSError):  # nor can it take advice
                os.posix_fadvise(self.file, start, size, os.POSIX_FADV_WILLNEED)


def fill_part(source: ByteSource, dtype: torch.dtype, placement: Placement, out: Tensor) -> None:
    """Fill ``out`` with this rank's part of a global tensor.

    source: of the global tensor. dtype: of the global tensor. out: a host tensor of the shape ``placement.part_view``,
    of any strides and dtype.

    A contiguous tensor of this dtype is filled in place; for any other, a block of `BLOCK` bytes is read at a time.
    """
    if not out.numel():
        return
    whole = not placement.sharded or (placement.count == 1 and not placement.padded)  # one range of bytes
    outer = 1 if whole else math.prod(placement.view[: placement.dim])
    runs = [(0, 0, out.numel())] if whole else placement.runs()
    runs = [(first * dtype.itemsize, place * dtype.itemsize, number * dtype.itemsize) for first, place, number in runs]
    out = out.view(placement.part_view or (1,))
    own = out[0].numel() * dtype.itemsize
    at_once = len(out) if _direct(out, dtype) else max(1, BLOCK // own)
    for low in range(0, len(out), at_once):
        with _filled(out[low : low + at_once], dtype) as target:
            if placement.padded:
                target.zero_()
            if outer == 1:
                _read_runs(source, target, low * own, runs)
            else:
                stretch = placement.stretch * dtype.itemsize
                width = math.prod(placement.view[placement.dim :]) * dtype.itemsize
                _read_rows(source, target.view(-1, stretch), low * own // stretch, runs, width)


def _direct(out: Tensor, dtype: torch.dtype) -> bool:
    return out.is_contiguous() and out.dtype == dtype


@contextlib.contextmanager
def _filled(out: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """The bytes of a contiguous tensor of ``dtype`` that has the values of ``out`` when the block ends."""
    if _direct(out, dtype):
        yield out.view(-1).view(torch.uint8)
        torch.autograd.graph.increment_version(out)  # PyTorch cannot know that the memory was written
    else:
        block = torch.empty(out.shape, dtype=dtype)
        yield block.view(-1).view(torch.uint8)
        out.copy_(block)


def _read_runs(source: ByteSource, target: Tensor, begin: int, runs: Sequence[tuple[int, int, int]]) -> None:
    """Fill ``target``, the bytes of a part from ``begin`` on. runs: of the part, as `Placement.runs` in bytes."""
    values = bytes_of(target)
    for first, place, number in runs:
        low, high = max(place, begin), min(place + number, begin + len(values))
        if low < high:
            source.read(values[low - begin : high - begin], first + low - place)


def _read_rows(source: ByteSource, target: Tensor, top: int, runs: Sequence[tuple[int, int, int]], width: int) -> None:
    """Fill ``target`` [rows, bytes] with the ``runs`` of each row, of ``width`` bytes, from number ``top`` on."""
    most = max(1, BLOCK // width)
    short = any(number < SHORT_ROW for *_, number in runs)
    whole = torch.empty(min(most, len(target)), width, dtype=torch.uint8) if short else None
    for part in torch.split(target, most):
        start, top = top * width, top + len(part)
        if whole is not None:
            block = whole[: len(part)]
            source.read(bytes_of(block.view(-1)), start)
            for first, place, number in runs:
                part[:, place : place + number] = block[:, first : first + number]
            continue
        source.announce(start, len(part) * width)
        values = bytes_of(part.view(-1))
        for row in range(len(part)):
            for first, place, number in runs:
                at = row * part.shape[1] + place
                source.read(values[at : at + number], start + row * width + first)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor of bytes."""
    array: Any = tensor.numpy()
    return memoryview(array)
