"""The first tensor in which two checkpoints differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from commengine import UsageError
from trainers.checkpoints import pointer
from trainers.checkpoints.checkpoint import MODEL, OPTIMIZER
from trainers.checkpoints.safetensors_file import read_layout
from trainers.checks.digests import bits


@dataclass(frozen=True)
class Difference:
    """How two tensors of one name differ: in words, or in ``elements`` of ``of``, by at most ``largest``."""

    name: str
    words: str = ""
    elements: int = 0
    of: int = 0
    largest: float = 0.0

    def text(self) -> str:
        """The difference in words."""
        return self.words or f"{self.elements:,} of {self.of:,} elements, by at most {self.largest:.3g}"


def common_checkpoint(one: Path, other: Path, iteration: int | None) -> tuple[Path, Path] | None:
    """The checkpoints of two runs' folders after the same step: the first after ``iteration``, else the last.

    None if the runs have no step in common.
    """
    first, second = ({path.stem: path for path in pointer.complete(folder)} for folder in (one, other))
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    later = [name for name in common if iteration is not None and name >= pointer.name_of(iteration)]
    name = later[0] if later else common[-1]
    return first[name], second[name]


def last_checkpoints(one: Path, other: Path) -> tuple[Path, Path] | None:
    """The last checkpoint of each of two runs' folders, of whatever steps; None if a run has none."""
    first, second = pointer.complete(one), pointer.complete(other)
    return (first[-1], second[-1]) if first and second else None


def differences(one: Path, other: Path) -> Iterator[Difference]:
    """What differs between two checkpoints: parameters, then masters and moments, in the order of their files.

    Raises UsageError where a file cannot be read.
    """
    for file in (MODEL, OPTIMIZER):
        try:
            yield from _in_files(one / file, other / file)
        except (OSError, ValueError, SafetensorError) as error:
            raise UsageError(f"{file} of {one} and {other}: cannot be compared: {error}") from error


def _in_files(one: Path, other: Path) -> Iterator[Difference]:
    names = _names(one)
    with safe_open(one, "pt") as first, safe_open(other, "pt") as second:
        theirs = set(second.keys())
        for name in names:
            if name not in theirs:
                yield Difference(name, words="is in the first run only")
            elif (found := difference(name, first.get_tensor(name), second.get_tensor(name))) is not None:
                yield found
        yield from (Difference(name, words="is in the second run only") for name in sorted(theirs - set(names)))


def _names(path: Path) -> list[str]:
    """The names of a file's tensors in the order in which they lie there, which is that of the model's parameters."""
    with path.open("rb") as file:
        stored = read_layout(file.fileno(), path)
    return sorted(stored, key=lambda name: stored[name].start)


def difference(name: str, one: Tensor, other: Tensor) -> Difference | None:
    """How two tensors differ in their bits; None if they do not."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return Difference(name, words=f"is {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}")
    unlike = int((bits(one) != bits(other)).sum())
    if not unlike:
        return None
    largest = float((one.double() - other.double()).abs().nan_to_num(torch.inf).max())
    return Difference(name, elements=unlike, of=one.numel(), largest=largest)
