"""The first tensor in which two checkpoints differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from commengine import UsageError
from trainers.checkpoints import pointer
from trainers.checkpoints.checkpoint import MODEL, OPTIMIZER
from trainers.checkpoints.parallel_safetensors import read_layout
from trainers.checks.digests import bits


def common_checkpoint(one: Path, other: Path, iteration: int | None) -> tuple[Path, Path] | None:
    """The checkpoints of two runs' folders after the same step: the first after ``iteration``, else the last.

    None if the runs have no step in common.
    """
    first, second = ({pointer.iteration_of(path): path for path in pointer.history(folder)} for folder in (one, other))
    common = sorted(step for step in first.keys() & second.keys() if step is not None)
    if not common:
        return None
    step = next((step for step in common if iteration is not None and step >= iteration), common[-1])
    return first[step], second[step]


def last_checkpoints(one: Path, other: Path) -> tuple[Path, Path] | None:
    """The last checkpoint of each of two runs' folders, of whatever steps; None if a run has none."""
    first, second = pointer.history(one), pointer.history(other)
    return (first[-1], second[-1]) if first and second else None


def differences(one: Path, other: Path) -> Iterator[str]:
    """What differs between two checkpoints, in words: parameters, then masters and moments, each in their file's order.

    Raises UsageError where a file cannot be read.
    """
    for file in (MODEL, OPTIMIZER):
        try:
            yield from _in_files(one / file, other / file)
        except (OSError, ValueError, SafetensorError) as error:
            raise UsageError(f"{file} of {one} and {other}: cannot be compared: {error}") from error


def _in_files(one: Path, other: Path) -> Iterator[str]:
    names = _names(one)
    with safe_open(one, "pt") as first, safe_open(other, "pt") as second:
        theirs = set(second.keys())
        for name in names:
            if name not in theirs:
                yield f"{name}: is in the first run only"
            elif said := difference(first.get_tensor(name), second.get_tensor(name)):
                yield f"{name}: {said}"
        yield from (f"{name}: is in the second run only" for name in sorted(theirs - set(names)))


def _names(path: Path) -> list[str]:
    """The names of a file's tensors in the order in which they lie there, which is that of the model's parameters."""
    with path.open("rb") as file:
        stored = read_layout(file.fileno(), path)
    return sorted(stored, key=lambda name: stored[name].start)


def difference(one: Tensor, other: Tensor) -> str:
    """How two tensors differ in their bits, in words; "" if they do not."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"is {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    unlike = int((bits(one) != bits(other)).sum())
    if not unlike:
        return ""
    largest = float((one.double() - other.double()).abs().nan_to_num(torch.inf).max())
    return f"{unlike:,} of {one.numel():,} elements, by at most {largest:.3g}"
