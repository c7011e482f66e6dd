"""A safetensors file that a whole group writes at once through MPI-IO.

The file holds global tensors, so a reader needs to know nothing about the run that wrote it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from commengine import CollectiveError, Communicator
from tplayers import Placement

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write(
    path: Path,
    described: Mapping[str, tuple[torch.dtype, Placement]],
    tensors: Iterable[tuple[str, Tensor]],
    comm: Communicator,
) -> None:
    """Write global tensors. Each rank of ``comm`` holds the parts that their placements describe.

    described: the dtype and placement of each tensor, in the order of the file. tensors: this rank's part of each, in
    any order that is the same on every rank; an iterator is advanced when the tensors before are written. Collective
    over ``comm``. The file is on disk when this returns, and the caller gives it its final name. Raises CollectiveError
    if MPI cannot write it.
    """
    from mpi4py import MPI

    header, starts, total = _layout(described)
    file = MPI.File.Open(comm.mpi, str(path), MPI.MODE_CREATE | MPI.MODE_WRONLY)
    try:
        file.Set_size(total)
        if comm.rank == 0:
            file.Write_at(0, header)
        for name, tensor in tensors:
            _write_tensor(file, starts[name], tensor, described[name][1], comm)
        file.Sync()
    except MPI.Exception as error:
        raise CollectiveError(f"writing {path}: {error}") from error
    finally:
        file.Close()


def read(path: Path, placements: Mapping[str, Placement]) -> Iterator[tuple[str, Tensor]]:
    """This rank's parts of the file's tensors, one after the other. Raises ValueError if names or shapes differ."""
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if names != set(placements):
            missing, extra = sorted(set(placements) - names), sorted(names - set(placements))
            raise ValueError(f"{path}: lacks {_some(missing)}; has unknown {_some(extra)}")
        for name, placement in placements.items():
            whole = file.get_tensor(name)
            if tuple(whole.shape) != placement.shape:
                raise ValueError(f"{path}: {name} is {list(whole.shape)}, the model's is {list(placement.shape)}")
            yield name, placement.part(whole)


def _layout(described: Mapping[str, tuple[torch.dtype, Placement]]) -> tuple[bytes, dict[str, int], int]:
    """The header, each tensor's first byte in the file, and the file's size."""
    entries: dict[str, Any] = {}
    offset = 0
    for name, (dtype, placement) in described.items():
        end = offset + math.prod(placement.shape) * dtype.itemsize
        entries[name] = {"dtype": _CODES[dtype], "shape": list(placement.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format's alignment
    header = len(text).to_bytes(8, "little") + text
    starts = {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()}
    return header, starts, len(header) + offset


def _write_tensor(file: Any, start: int, tensor: Tensor, placement: Placement, comm: Communicator) -> None:
    from mpi4py import MPI

    tensor = tensor.detach().cpu().contiguous()
    buffer = MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)
    if not placement.sharded:
        if comm.rank == 0:
            file.Write_at(start, [buffer, MPI.BYTE])
        return
    element = MPI.BYTE.Create_contiguous(tensor.element_size()).Commit()
    part = element.Create_subarray(placement.view, placement.part_view, placement.part_start).Commit()
    file.Set_view(start, element, part)
    file.Write_at_all(0, [buffer, tensor.numel(), element])
    file.Set_view(0)
    part.Free()
    element.Free()


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "nothing"
