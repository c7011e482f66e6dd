"""The tensors in the weight files of a folder: safetensors, one file or shards with an index, or pytorch_model.bin.

Files of ``torch.save`` that others wrote are read as tensors and plain data alone; nothing in them is executed.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from commengine.files.reading import InputFileError, read_json, require_regular
from trainers.checkpoints import disk
from trainers.checkpoints.parallel_safetensors import read_layout
from trainers.checkpoints.part_reader import ByteSource, FileBytes, bytes_of

#: packages and classes whose objects lie in checkpoints beside the weights: enumerations among the settings, states of
#: random generators and of loss scalers. `Unread` stands for each of them.
_PACKAGES = ("megatron.", "numpy.", "apex.", "transformer_engine.", "fp16.")
_CLASSES = ("signal.Signals", "_io.BytesIO", "pathlib.PosixPath", "enum.Enum")
_ZIP = b"PK\x03\x04"
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"


class Unread:
    """Stands for an object that is not read: it takes any arguments and any state, and keeps none."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def load_pickled(path: Path) -> Any:
    """The object in a file of ``torch.save``, with its tensors on the host.

    The tensors of a file of PyTorch 1.6 or later are mapped into memory: a tensor's pages are read when they are used.
    Besides tensors and plain data the file may hold an ``argparse.Namespace``. `Unread` stands for other objects that
    are known to lie in checkpoints. It is read with ``weights_only=True``.

    Raises InputFileError, which names the file: it is damaged or cut, or names a class or function that is not known;
    nothing of such a file is executed. Raises OSError if it cannot be read.
    """
    require_regular(path)
    with path.open("rb") as file:
        is_zip = file.read(4) == _ZIP
    foreign: list[str] = []
    while True:
        known: list[Any] = [argparse.Namespace, *((Unread, name) for name in foreign)]
        try:
            with torch.serialization.safe_globals(known):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        except Exception as error:  # a damaged pickle raises whatever its operations raise
            asked = re.search(r"GLOBAL ([\w.<>]+)", str(error))
            if asked is None:
                said = str(error).strip().split("\n")[0][:160] or type(error).__name__
                raise InputFileError(f"{path}: damaged, cut, or no file of torch.save: {said}") from None
            name = asked[1]
            if name in foreign or not (name.startswith(_PACKAGES) or name in _CLASSES):
                raise InputFileError(
                    f"{path}: refused, because it asks for {name[:80]}, which is no data; nothing of it was executed"
                ) from None
            foreign.append(name)


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file. source: its bytes."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: ByteSource

    def rows(self, first: int, shape: tuple[int, ...]) -> FileTensor:
        """A tensor of ``shape`` that begins at element ``first`` of this one."""
        return FileTensor(self.path, self.dtype, shape, _From(self.source, first * self.dtype.itemsize))


def open_tensors(folder: Path, files: contextlib.ExitStack) -> dict[str, FileTensor]:
    """The tensors in the weight files of ``folder``, by their names there. Not collective.

    A tensor is read when it is asked for. Old files of PyTorch, which are no zip archives, are read whole.
    files: closes the files that are opened.

    Raises ValueError that names the file that is missing, damaged, or holds anything but tensors, and OSError.
    """
    for name, read in ((SAFETENSORS, _safetensors), (PICKLED, _pickled)):
        index = folder / f"{name}.index.json"
        if (folder / name).exists():  # as transformers does: a whole file wins
            return read(folder / name, files)
        if index.exists():
            return _of_shards(index, _weight_map(index), read, files)
    raise ValueError(f"{folder}: has no {SAFETENSORS}, no {PICKLED}, and no index of shards of either")


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor. Raises ValueError that names the index, or a shard that is missing."""
    try:
        found = read_json(index)["weight_map"]
        good = all(isinstance(file, str) and Path(file).name == file for file in found.values())
    except (KeyError, TypeError, AttributeError) as error:
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
    file = files.enter_context(disk.opened(path))
    return {
        name: FileTensor(path, one.dtype, one.shape, FileBytes(file, path, one.start))
        for name, one in read_layout(file, path).items()
    }


def _pickled(path: Path, _: contextlib.ExitStack) -> dict[str, FileTensor]:
    found, views = load_pickled(path), {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{path}: holds no tensors by their names")
    for name, tensor in found.items():
        # A nested tensor has no shape, and one of the meta device no values.
        in_memory = isinstance(tensor, Tensor) and tensor.device.type == "cpu" and not tensor.is_nested
        if not in_memory or tensor.layout != torch.strided:
            raise ValueError(f"{path}: {name[:100]} is no tensor")
        views[name] = FileTensor(path, tensor.dtype, tuple(tensor.shape), _TensorBytes(tensor.detach()))
    return views


@dataclass(frozen=True)
class _From:
    """The bytes of a `ByteSource` from one of them on."""

    source: ByteSource
    first: int

    def read(self, target: memoryview, start: int) -> None:
        self.source.read(target, self.first + start)

    def announce(self, start: int, size: int) -> None:
        self.source.announce(self.first + start, size)


@dataclass(frozen=True)
class _TensorBytes:
    """The bytes of a tensor that is in memory, or mapped into it, as a `ByteSource`."""

    tensor: Tensor

    def read(self, target: memoryview, start: int) -> None:
        flat = self.tensor.contiguous().view(-1).view(torch.uint8)
        target[:] = bytes_of(flat)[start : start + len(target)]

    def announce(self, start: int, size: int) -> None:
        pass
