"""A safetensors file of global tensors that a whole group writes at once, and of which each rank reads its parts.

The format: 8 bytes with the header's length (little-endian), the header in JSON, the tensors' bytes without gaps
(https://huggingface.co/docs/safetensors, section Format). The file says nothing of the ranks that wrote it. A rank
writes contiguous ranges of bytes only: where the parts of a tensor alternate in the file, the ranks first exchange them
through the engine, so that each has whole rows.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from commengine import Communicator
from tplayers import Placement

from . import disk
from .part_reader import FileBytes, bytes_of, fill_part

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in CODES.items()}

#: bytes; the limit of the safetensors library
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: bytes ``start`` to ``stop``, in row-major order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def lay_out(
    described: Mapping[str, tuple[torch.dtype, Placement]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, StoredTensor]]:
    """The header of a file of these global tensors, in their order, and where each of them lies.

    metadata: the file's ``__metadata__``; None for none.
    Raises ValueError that names the first tensor whose dtype the format does not have.
    """
    stored, offset = {}, 0
    for name, (dtype, placement) in described.items():
        if dtype not in CODES:
            raise ValueError(f"{name} is of {dtype}, which a safetensors file cannot hold")
        end = offset + math.prod(placement.shape) * dtype.itemsize
        stored[name] = StoredTensor(dtype, placement.shape, offset, end)
        offset = end
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    entries |= {
        name: {"dtype": CODES[one.dtype], "shape": list(one.shape), "data_offsets": [one.start, one.stop]}
        for name, one in stored.items()
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format's alignment
    header = len(text).to_bytes(8, "little") + text
    return header, {name: _moved(one, len(header)) for name, one in stored.items()}


def read_layout(file: int, path: Path) -> dict[str, StoredTensor]:
    """Where each tensor of an open file lies. Raises ValueError, naming ``path``, if that is not the file's size.

    file: a descriptor.
    """
    size = os.fstat(file).st_size
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise ValueError(f"{path}: is no safetensors file, or is cut: its header of {length} bytes is not there")
    try:
        entries = json.loads(os.pread(file, length, 8))
        entries.pop("__metadata__", None)
        foreign = [(name, entry["dtype"]) for name, entry in entries.items() if entry["dtype"] not in _DTYPES]
        stored = {} if foreign else {name: _entry(entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: its header is damaged: {str(error)[:200]!r}") from error
    if foreign:
        name, code = foreign[0]
        raise ValueError(f"{path}: {name[:100]} is of dtype {str(code)[:20]}; valid: {', '.join(_DTYPES)}")
    end = 0
    for name, one in sorted(stored.items(), key=lambda item: (item[1].start, item[1].stop)):
        if one.start != end or one.stop - one.start != math.prod(one.shape) * one.dtype.itemsize:
            raise ValueError(f"{path}: its header is damaged: the place of {name} does not fit its shape or the others")
        end = one.stop
    if size != 8 + length + end:
        raise ValueError(f"{path}: has {size} bytes; its header says {8 + length + end}")
    return {name: _moved(one, 8 + length) for name, one in stored.items()}


def _entry(entry: Any) -> StoredTensor:
    shape, (start, stop) = entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError("a size or place is no natural number")
    return StoredTensor(_DTYPES[entry["dtype"]], tuple(shape), start, stop)


def _moved(one: StoredTensor, offset: int) -> StoredTensor:
    return StoredTensor(one.dtype, one.shape, one.start + offset, one.stop + offset)


#: bytes of the longest range that is written at once
CHUNK = 32 << 20

#: bytes from which on all ranks share in writing a tensor that each of them holds whole
SHARED_FROM = 1 << 20


def ranges(
    described: Mapping[str, tuple[torch.dtype, Placement]], tensors: Iterable[tuple[str, Tensor]], comm: Communicator,
    *, metadata: Mapping[str, str] | None = None, header: bool = True,
) -> Iterator[tuple[int, memoryview]]:  # fmt: skip
    """This rank's (first byte in the file, bytes); the ranks' ranges together are the file.

    described: the dtype and placement of each tensor, in the order of the file. tensors: this rank's part of each, in
    any order that is the same on every rank; an iterator is advanced when the caller is done with the tensor before.
    Another group may write other tensors of the file. metadata: of the file. header: this group writes its header.
    The bytes are valid until the next range is asked for. Collective over ``comm``: every rank must exhaust it.
    """
    head, stored = lay_out(described, metadata)
    if header and comm.rank == 0:
        yield 0, memoryview(head)
    for number, (name, tensor) in enumerate(tensors):
        part = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        start, placement = stored[name].start, described[name][1]
        if not placement.sharded or (placement.count == 1 and not placement.padded):
            yield from _cut(start, *_share(part, number, comm))
        elif (outer := math.prod(placement.view[: placement.dim])) == 1:
            size = tensor.element_size()
            for first, place, count in placement.runs():
                yield from _cut(start, first * size, part[place * size : (place + count) * size])
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
    path: Path, placements: Mapping[str, Placement], *, wanted: Container[str] | None = None,
    any_dtype: Container[str] = (), into: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """This rank's parts of the file's tensors, one after the other, in new memory. It reads these parts only.

    wanted: the names that this rank needs; None: all. any_dtype: the names of tensors that need not be real numbers.
    into: by name, the contiguous host tensors that are filled and given in place of new memory; of any dtype.

    Raises ValueError, naming the file, if names, shapes or dtypes differ, and OSError if it cannot be read.
    """
    with disk.opened(path) as file:
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
                if (part := (into or {}).get(name)) is None:
                    part = torch.empty(placement.local_shape, dtype=one.dtype)
                fill_part(FileBytes(file, path, one.start), one.dtype, placement, part.view(placement.part_view))
                yield name, part


def some(names: Sequence[str]) -> str:
    """The first of ``names``, for an error message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "nothing"
