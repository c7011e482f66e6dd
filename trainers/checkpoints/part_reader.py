"""This rank's part of a global tensor, read from where the whole tensor is stored, in as few bytes as is fast."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
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
    view, sizes = placement.view or (1,), placement.part_view or (1,)
    out = out.view(sizes) if out.dim() == 0 else out
    if placement.padded:
        _fill_padded(source, out, dtype, placement)
        return
    split = placement.dim if placement.count > 1 else None
    own = out[0].numel() * dtype.itemsize
    blocks = [(0, len(out))] if _direct(out, dtype) else _blocks(len(out), own)
    if split in (None, 0):  # one range of bytes
        start = placement.part_start[0] * own if split == 0 else 0
        for low, high in blocks:
            with _filled(out[low:high], dtype) as target:
                source.read(bytes_of(target), start + low * own)
        return
    assert split is not None
    rows, width = math.prod(view[1:split]), math.prod(sizes[split:]) * dtype.itemsize
    index, count = placement.index, placement.count
    for low, high in blocks:
        with _filled(out[low:high], dtype) as target:
            _read_rows(source, target.view((high - low) * rows, width), low * rows, index, count)


def _blocks(rows: int, size: int) -> Iterator[tuple[int, int]]:
    """(First, end) of runs of ``rows`` rows of ``size`` bytes; a run has at most `BLOCK` bytes, or one row."""
    most = max(1, BLOCK // max(size, 1))
    for low in range(0, rows, most):
        yield low, min(low + most, rows)


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


def _read_rows(source: ByteSource, target: Tensor, first: int, index: int, count: int) -> None:
    """Fill ``target`` [rows, width] with part ``index`` of ``count`` of each row from number ``first`` on."""
    rows, width = target.shape
    most = max(1, BLOCK // (count * width))
    whole = None if width >= SHORT_ROW else torch.empty(min(most, rows), count, width, dtype=torch.uint8)
    for top in range(0, rows, most):
        part, start = target[top : top + most], (first + top) * count * width
        if whole is not None:
            block = whole[: len(part)]
            source.read(bytes_of(block.view(-1)), start)
            part.copy_(block[:, index])
            continue
        source.announce(start, len(part) * count * width)
        values = bytes_of(part.view(-1))
        for row in range(len(part)):
            source.read(values[row * width : (row + 1) * width], start + (row * count + index) * width)


def _fill_padded(source: ByteSource, out: Tensor, dtype: torch.dtype, placement: Placement) -> None:
    """Fill ``out``, a part with padding, which becomes 0."""
    runs, size = placement.runs(), dtype.itemsize
    flat = out.view(-1) if out.is_contiguous() and out.numel() == placement.stretch else None
    if flat is None:
        with _filled(out, dtype) as target:
            target.zero_()
            _read_padded(source, target, size, placement)
        return
    end = 0
    for first, place, number in runs:
        flat[end:place] = 0
        end = place + number
        values = flat[place:end]
        for low, high in [(0, number)] if _direct(values, dtype) else _blocks(number, size):
            with _filled(values[low:high], dtype) as target:
                source.read(bytes_of(target), (first + low) * size)
    flat[end:] = 0


def _read_padded(source: ByteSource, target: Tensor, size: int, placement: Placement) -> None:
    """Fill ``target`` [bytes], a part with padding that is 0 already, of elements of ``size`` bytes."""
    rows, runs = target.view(-1, placement.stretch * size), placement.runs()
    width = math.prod(placement.view[placement.dim :]) * size  # of a row in the file
    most = max(1, BLOCK // width)
    short = any(number * size < SHORT_ROW for *_, number in runs)
    whole = torch.empty(min(most, len(rows)), width, dtype=torch.uint8) if short else None
    for top in range(0, len(rows), most):
        part = rows[top : top + most]
        if whole is not None:
            block = whole[: len(part)]
            source.read(bytes_of(block.view(-1)), top * width)
            for first, place, number in runs:
                part[:, place * size : (place + number) * size] = block[:, first * size : (first + number) * size]
            continue
        source.announce(top * width, len(part) * width)
        for row, values in enumerate(part, top):
            row_bytes = bytes_of(values)
            for first, place, number in runs:
                source.read(row_bytes[place * size : (place + number) * size], row * width + first * size)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor of bytes."""
    array: Any = tensor.numpy()
    return memoryview(array)
