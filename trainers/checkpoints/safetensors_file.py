"""The layout of a safetensors file: its header, and where each tensor lies.

The format: 8 bytes with the header's length (little-endian), the header in JSON, the tensors' bytes without gaps
(https://huggingface.co/docs/safetensors, section Format).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tplayers import Placement

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
