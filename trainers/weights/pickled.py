"""Reading files of ``torch.save`` that others wrote: tensors and plain data alone; nothing in them is executed."""

from __future__ import annotations

import argparse
import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trainers.files.reading import InputFileError, require_regular

#: packages and classes whose objects lie in checkpoints beside the weights: enumerations among the settings, states of
#: random generators and of loss scalers. `Unread` stands for each of them.
_PACKAGES = ("megatron.", "numpy.", "apex.", "transformer_engine.", "fp16.")
_CLASSES = ("signal.Signals", "_io.BytesIO", "pathlib.PosixPath", "enum.Enum")
#: bytes of the longest pickle; the tensors' values are not part of it
_LONGEST = 1 << 28
_ZIP = b"PK\x03\x04"
#: pickles at the beginning of PyTorch's older format: a magic number, a version, facts about the system, the object
_OLD_PICKLES = 4


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
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == _ZIP
            file.seek(0)
            foreign = {name for name in _globals(file, is_zip) if name.startswith(_PACKAGES) or name in _CLASSES}
        known: list[Any] = [argparse.Namespace, *((Unread, name) for name in sorted(foreign))]
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (OSError, InputFileError):
        raise
    except Exception as error:  # a damaged pickle raises whatever its operations raise
        if found := re.search(r"GLOBAL ([\w.<>]+)", str(error)):
            raise InputFileError(
                f"{path}: refused, because it asks for {found[1][:80]}, which is no data; nothing of it was executed"
            ) from None
        said = str(error).strip().split("\n")[0][:160]
        raise InputFileError(
            f"{path}: damaged, cut, or no file of torch.save: {said or type(error).__name__}"
        ) from None


def _globals(file: BinaryIO, is_zip: bool) -> Iterator[str]:
    """The full names of the classes and functions that the file's pickle asks for. It executes nothing."""
    if not is_zip:
        for _ in range(_OLD_PICKLES):
            yield from _of_pickle(file)
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:  # it may unpack to any size; PyTorch compresses nothing
                raise ValueError(f"its entry {entry.filename[:80]} is compressed")
            if entry.filename.endswith("/data.pkl"):
                if entry.file_size > _LONGEST:
                    raise ValueError(f"a pickle of {entry.file_size} bytes")
                yield from _of_pickle(archive.read(entry))


def _of_pickle(pickled: bytes | BinaryIO) -> Iterator[str]:
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "GLOBAL":
            yield str(argument).replace(" ", ".", 1)
