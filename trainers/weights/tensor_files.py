"""The tensors in the weight files of a folder: safetensors, one file or shards with an index, or pytorch_model.bin."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from trainers.checkpoints import disk
from trainers.checkpoints.part_reader import ByteSource, FileBytes, bytes_of
from trainers.checkpoints.safetensors_file import read_layout
from trainers.files.reading import read_text

from .pickled import load_pickled

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file. source: its bytes."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: ByteSource


@dataclass
class TensorFiles:
    """The tensors of a folder, by the names in its files. ``close`` closes the files; so does a ``with`` block.

    A tensor is read when it is asked for. Old files of PyTorch, which are no zip archives, are read whole.
    """

    tensors: dict[str, FileTensor]
    _files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the weight files of ``folder``. Not collective.

        Raises ValueError that names the file that is missing, damaged, or holds anything but tensors, and OSError.
        """
        for name, read in ((SAFETENSORS, _safetensors), (PICKLED, _pickled)):
            index = folder / f"{name}.index.json"
            if not (folder / name).exists() and not index.exists():
                continue
            with contextlib.ExitStack() as files:
                if (folder / name).exists():  # as transformers does: a whole file wins
                    found = read(folder / name, files)
                else:
                    found = _of_shards(index, _weight_map(index), read, files)
                return cls(found, files.pop_all())
        raise ValueError(f"{folder}: has no {SAFETENSORS}, no {PICKLED}, and no index of shards of either")

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor. Raises ValueError that names the index, or a shard that is missing."""
    try:
        found = json.loads(read_text(index))["weight_map"]
        good = all(isinstance(file, str) and Path(file).name == file for file in found.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index}: no index of shards: {str(error)[:200]}") from error
    if not good or not found:
        raise ValueError(f"{index}: no index of shards: weight_map must name files beside it")
    if missing := sorted({file for file in found.values() if not (index.parent / file).exists()}):
        raise ValueError(f"{index.parent / missing[0]}: there is no such file, and {index.name} names it")
    return dict(found)


def _of_shards(
    index: Path, where: dict[str, str],
    read: Callable[[Path, contextlib.ExitStack], dict[str, FileTensor]], files: contextlib.ExitStack,
) -> dict[str, FileTensor]:  # fmt: skip
    shards = {file: read(index.parent / file, files) for file in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in shards[file]:
            raise ValueError(f"{index.parent / file}: lacks {name}, and {index.name} says that it is there")
    return {name: shards[file][name] for name, file in where.items()}


def _safetensors(path: Path, files: contextlib.ExitStack) -> dict[str, FileTensor]:
    file = disk.open_to_read(path)
    files.callback(os.close, file)
    return {
        name: FileTensor(path, one.dtype, one.shape, FileBytes(file, path, one.start))
        for name, one in read_layout(file, path).items()
    }


def _pickled(path: Path, files: contextlib.ExitStack) -> dict[str, FileTensor]:
    del files
    return dict(_views(path, load_pickled(path)))


def _views(path: Path, found: Any) -> Iterator[tuple[str, FileTensor]]:
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{path}: holds no tensors by their names")
    for name, tensor in found.items():
        # A nested tensor has no shape, and one of the meta device no values.
        in_memory = isinstance(tensor, Tensor) and tensor.device.type == "cpu" and not tensor.is_nested
        if not in_memory or tensor.layout != torch.strided:
            raise ValueError(f"{path}: {name[:100]} is no tensor")
        yield name, FileTensor(path, tensor.dtype, tuple(tensor.shape), _TensorBytes(tensor.detach()))


@dataclass(frozen=True)
class _TensorBytes:
    """The bytes of a tensor that is in memory, or mapped into it, as a `ByteSource`."""

    tensor: Tensor

    def read(self, target: memoryview, start: int) -> None:
        flat = self.tensor.contiguous().view(-1).view(torch.uint8)
        target[:] = bytes_of(flat)[start : start + len(target)]

    def announce(self, start: int, size: int) -> None:
        pass
