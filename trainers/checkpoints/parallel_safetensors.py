"""A safetensors file of global tensors that a whole group writes at once, and of which each rank reads its parts.

The file says nothing of the ranks that wrote it. A rank writes contiguous ranges of bytes only: where the parts of a
tensor alternate in the file, the ranks first exchange them through the engine, so that each has whole rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from commengine import Communicator
from tplayers import Placement

from . import disk
from .part_reader import FileBytes, bytes_of, fill_part
from .safetensors_file import lay_out, read_layout

#: bytes of the longest range that is written at once
CHUNK = 32 << 20

#: bytes from which on all ranks share in writing a tensor that each of them holds whole
SHARED_FROM = 1 << 20


def ranges(
    described: Mapping[str, tuple[torch.dtype, Placement]],
    tensors: Iterable[tuple[str, Tensor]],
    comm: Communicator,
    *,
    metadata: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, memoryview]]:
    """This rank's (first byte in the file, bytes); the ranks' ranges together are the file.

    described: the dtype and placement of each tensor, in the order of the file. tensors: this rank's part of each, in
    any order that is the same on every rank; an iterator is advanced when the caller is done with the tensor before.
    metadata: of the file.
    The bytes are valid until the next range is asked for. Collective over ``comm``: every rank must exhaust it.
    """
    header, stored = lay_out(described, metadata)
    if comm.rank == 0:
        yield 0, memoryview(header)
    for number, (name, tensor) in enumerate(tensors):
        part = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        start, placement = stored[name].start, described[name][1]
        if not placement.sharded or (placement.count == 1 and not placement.padded):
            yield from _cut(start, *_share(part, number, comm))
        elif placement.padded and math.prod(placement.view[: placement.dim]) == 1:
            size = tensor.element_size()
            for first, place, count in placement.runs():
                yield from _cut(start, first * size, part[place * size : (place + count) * size])
        elif (outer := math.prod(placement.view[: placement.dim])) == 1:
            yield from _cut(start, comm.rank * part.numel(), part)
        elif part.numel():
            yield from _exchanged(start, part.view(outer, -1), comm, placement)


def file_size(described: Mapping[str, tuple[torch.dtype, Placement]], metadata: Mapping[str, str] | None = None) -> int:
    """The bytes of the file that `ranges` gives."""
    header, stored = lay_out(described, metadata)
    return max((one.stop for one in stored.values()), default=len(header))


def _cut(start: int, offset: int, part: Tensor) -> Iterator[tuple[int, memoryview]]:
    """``part``, which begins ``offset`` bytes after ``start``, in pieces of `CHUNK` bytes."""
    for low in range(0, part.numel(), CHUNK):
        yield start + offset + low, bytes_of(part[low : low + CHUNK])


def _share(whole: Tensor, number: int, comm: Communicator) -> tuple[int, Tensor]:
    """(offset, bytes): what this rank writes of a tensor that all ranks hold; small ones go to the ranks in turn."""
    if whole.numel() < SHARED_FROM:
        return 0, whole if comm.rank == number % comm.size else whole[:0]
    each = -(-whole.numel() // comm.size)
    return comm.rank * each, whole[comm.rank * each : (comm.rank + 1) * each]


def _exchanged(start: int, part: Tensor, comm: Communicator, placement: Placement) -> Iterator[tuple[int, memoryview]]:
    """Whole rows, without padding, of a tensor of which each rank has a part of every row: ``part`` [rows, bytes]."""
    outer, width = part.shape
    most = max(1, CHUNK // (comm.size * width))
    top = 0
    while top < outer:
        rows = min(most, -(-(outer - top) // comm.size))  # of each rank
        sent = part[top : top + rows * comm.size]
        if len(sent) < rows * comm.size:
            sent = torch.cat([sent, sent.new_zeros(rows * comm.size - len(sent), width)])
        received = torch.empty_like(sent)
        comm.all_to_all(received, sent.contiguous())
        mine = top + comm.rank * rows
        whole = received.view(comm.size, rows, width).transpose(0, 1).reshape(rows, -1)[: max(0, outer - mine)]
        if len(whole):
            real = placement.without_padding(whole) if placement.padded else whole
            yield start + mine * real.shape[1], bytes_of(real.reshape(-1))
        top += rows * comm.size


def read(
    path: Path,
    placements: Mapping[str, Placement],
    *,
    wanted: Container[str] | None = None,
    any_dtype: Container[str] = (),
    into: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """This rank's parts of the file's tensors, one after the other, in new memory. It reads these parts only.

    wanted: the names that this rank needs; None: all. any_dtype: the names of tensors that need not be real numbers.
    into: by name, the contiguous host tensors that are filled and given in place of new memory; of any dtype.

    Raises ValueError, naming the file, if names, shapes or dtypes differ, and OSError if it cannot be read.
    """
    file = disk.open_to_read(path)
    try:
        stored = read_layout(file, path)
        if set(stored) != set(placements):
            missing, extra = sorted(set(placements) - set(stored)), sorted(set(stored) - set(placements))
            faults = [("lacks", missing), ("has unknown", extra)]
            raise ValueError(f"{path}: {'; '.join(f'{word} {some(names)}' for word, names in faults if names)}")
        for name, placement in placements.items():
            one = stored[name]
            if one.shape != placement.shape:
                raise ValueError(f"{path}: {name} is {list(one.shape)}, the model's is {list(placement.shape)}")
            if not one.dtype.is_floating_point and name not in any_dtype:
                raise ValueError(f"{path}: {name} is of {one.dtype}; a parameter or its state is never")
            if wanted is None or name in wanted:
                part = None if into is None else into.get(name)
                if part is None:
                    part = torch.empty(placement.local_shape, dtype=one.dtype)
                fill_part(FileBytes(file, path, one.start), one.dtype, placement, part.view(placement.part_view))
                yield name, part
    finally:
        os.close(file)


def some(names: Sequence[str]) -> str:
    """The first of ``names``, for an error message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "nothing"
