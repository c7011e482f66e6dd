"""Checks of a call's arguments on this rank alone, before anything is sent.

The checks are free functions of the calling communicator. Each one returns what the operation takes, or raises
`CollectiveError`.
"""

from __future__ import annotations

import operator
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from commengine.dtypes import COMPLEX_TYPES, DTYPES, REAL_TYPES, reduction_error
from commengine.errors import GroupMember, call_error
from commengine.stream import Stream, Work

from .operation import Operation

#: a torch tensor, or an array with DLPack (NumPy, CuPy): its memory is used, not copied
TensorLike: TypeAlias = Any

#: the largest C int: the largest colour and key that MPI takes
INT_MAX = 2**31 - 1


class Runs(Protocol):
    """What runs the calls of a communicator: `commengine.calls.dispatch.Dispatcher`."""

    known: Any

    def run(self, operation: Operation, args: tuple[Any, ...], stream: Stream | None) -> Work:
        """Run an operation, or enqueue it on ``stream``."""

    def prepare_exchange(self, comm: Any, transfers: Any, stream: Stream | None) -> Any:
        """Return messages as one object."""

    def refuse_block(self, operation: str) -> None:
        """Raise CollectiveError in an open coalesce() block: the call has an answer, and a block has none yet."""


class Caller(GroupMember, Protocol):
    """The communicator whose operation is called."""

    device: torch.device
    no_device: str | None

    @property
    def _backend(self) -> Any: ...
    @property
    def _calls(self) -> Runs: ...


def checked_tensor(group: Caller, operation: str, value: TensorLike, argument: str = "tensor") -> Tensor:
    """Return ``value`` as a dense, contiguous tensor of a known dtype, on the host or on the group's device.

    argument: the name of the argument, for the error message.
    """
    tensor = value if isinstance(value, Tensor) else _from_dlpack(group, operation, value, argument)
    here = tensor.is_cpu or tensor.device == group.device
    if here and not _has_memory(tensor):
        problem = f"is a {type(tensor).__name__} without memory of its own (nested, masked, fake, in a transform of "
        raise call_error(group, operation, f"{argument} {problem}torch.func, or of a resized storage)")
    if here and tensor.layout is torch.strided and tensor.is_contiguous() and tensor.dtype in REAL_TYPES:
        if tensor.is_neg():  # its memory holds the negated values
            raise call_error(group, operation, f"{argument} is a lazily negated view; call .resolve_neg() first")
        return tensor
    if here and tensor.layout is torch.strided and tensor.is_contiguous() and tensor.dtype in COMPLEX_TYPES:
        if tensor.is_conj() or tensor.is_neg():  # its memory holds the conjugated values
            problem = "is a lazily conjugated or negated view; call .resolve_conj() and .resolve_neg() first"
            raise call_error(group, operation, f"{argument} {problem}")
        if tensor.is_cpu and tensor.dtype is torch.complex128 and tensor.data_ptr() % 16:  # torch would end the process
            raise call_error(group, operation, f"{argument} begins at no multiple of 16 bytes; copy it first")
        return tensor
    if not here:
        problem = f"lies on {tensor.device}, the communicator's device is {group.device}"
        problem += f": {group.no_device}" if group.no_device else ""
    elif tensor.layout is not torch.strided:
        problem = f"has layout {tensor.layout}; collectives need a dense (strided) tensor"
    elif not tensor.is_contiguous():
        problem = f"of shape {list(tensor.shape)} and strides {list(tensor.stride())} is not contiguous"
    else:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in DTYPES))
        problem = f"has dtype {tensor.dtype}, which is not one of {names}"
    raise call_error(group, operation, f"{argument} {problem}")


def _has_memory(tensor: Tensor) -> bool:
    """Whether the elements of a tensor lie at its address. Other layouts than strided are refused elsewhere."""
    try:
        apart = tensor.is_nested or (tensor.numel() > 0 and not tensor.data_ptr())
        return tensor.layout is not torch.strided or not apart
    except RuntimeError:
        return tensor.layout is not torch.strided


def _from_dlpack(group: Caller, operation: str, value: TensorLike, argument: str) -> Tensor:
    if not hasattr(value, "__dlpack__"):
        raise call_error(group, operation, f"{argument} is a {type(value).__name__}, not a tensor or DLPack array")
    if isinstance(value, np.ma.MaskedArray):
        raise call_error(group, operation, f"{argument} is a masked array, of which the mask would be lost")
    # torch.from_dlpack refuses neither: it makes read-only memory writable, and a negative stride ends the process.
    array = getattr(value, "__array_interface__", {})
    if array.get("data", (0, False))[1]:
        raise call_error(group, operation, f"{argument} is a read-only array; copy it first")
    if min(array.get("strides") or (0,)) < 0:
        raise call_error(group, operation, f"{argument} of strides {array['strides']} bytes is not contiguous")
    try:
        tensor: Tensor = torch.utils.dlpack.from_dlpack(value)
        return tensor
    except (BufferError, TypeError, RuntimeError) as error:
        raise call_error(group, operation, f"{argument} cannot be used through DLPack: {error}") from error


def checked_pair(group: Caller, row: Operation, output: TensorLike, input: TensorLike) -> tuple[Tensor, Tensor]:
    """Return (output, input) of a call in which one, the ``whole``, has ``size`` times the rows of the other."""
    operation = row.name
    output = checked_tensor(group, operation, output, "output")
    input = checked_tensor(group, operation, input, "input")
    if output.dtype != input.dtype:
        raise call_error(group, operation, f"output is {output.dtype}, input {input.dtype}")
    big, small = (input, output) if row.whole == "input" else (output, input)
    start, first, whole, part = big.data_ptr(), small.data_ptr(), big.nbytes, small.nbytes
    if whole != part * group.size or big.dim() != 1 or small.dim() != 1:  # a shape costs more to get than numbers
        names = ("input", "output") if big is input else ("output", "input")
        _check_whole(group, operation, names[0], big, names[1], small)
    if big.is_cpu != small.is_cpu or (first < start + whole and start < first + part):
        in_place = first == start + group.rank * part  # this rank's rows
        if not row.in_place or not in_place:
            check_disjoint(group, operation, output, input)
    return output, input


def root_tensor(
    group: Caller, operation: str, argument: str, value: TensorLike | None, part: Tensor, root: int
) -> Tensor | None:
    """Return the tensor that only ``root`` gives; its dim 0 is ``size`` times that of ``part``. None on other ranks."""
    if group.rank != root:
        return None
    if value is None:
        raise call_error(group, operation, f"{argument} is None on the root, rank {root}")
    tensor = checked_tensor(group, operation, value, argument)
    check_alike(group, operation, tensor, part)
    _check_whole(group, operation, argument, tensor, "input" if argument == "output" else "output", part)
    return tensor


def _check_whole(group: Caller, operation: str, big_name: str, big: Tensor, small_name: str, small: Tensor) -> None:
    rows = small.shape or (1,)  # a 0-d tensor is one row
    if big.shape != (rows[0] * group.size, *rows[1:]):
        raise call_error(
            group,
            operation,
            f"{big_name} {list(big.shape)} must be {small_name} {list(small.shape)} with dim 0 "
            f"times the group's size {group.size}",
        )


def check_alike(group: Caller, operation: str, one: Tensor, other: Tensor) -> None:
    """Check that two tensors of a call have one dtype and one device, and share no memory."""
    if one.dtype != other.dtype:
        raise call_error(group, operation, f"the tensors are {one.dtype} and {other.dtype}")
    check_disjoint(group, operation, one, other)


def check_reduction(group: Caller, operation: str, tensor: Tensor, op: str) -> None:
    """Check that ``op`` is a reduction that the host, or the device's backend, has for the tensor's dtype."""
    problem = reduction_error(tensor.dtype, op)
    if problem is None and not tensor.is_cpu:
        problem = group._backend.refusal(tensor.dtype, op)
    if problem is not None:
        raise call_error(group, operation, problem)


def check_disjoint(group: Caller, operation: str, one: Tensor, other: Tensor) -> None:
    """Check that two tensors of a call lie on one device and share no memory."""
    if one.is_cpu != other.is_cpu:
        raise call_error(group, operation, f"the tensors lie on {one.device} and {other.device}")
    first, second = one.data_ptr(), other.data_ptr()
    if first < second + other.nbytes and second < first + one.nbytes:
        raise call_error(group, operation, "the tensors share memory")


def check_rank(group: Caller, operation: str, argument: str, rank: int) -> int:
    """Return ``rank`` as an int; it must be a rank of the group."""
    try:
        number = operator.index(rank)
    except TypeError:
        number = -1
    if not 0 <= number < group.size:
        raise call_error(group, operation, f"{argument}={rank!r} is not a rank of the group: 0 to {group.size - 1}")
    return number


def is_c_int(number: Any, least: int) -> bool:
    """Whether ``number`` is an integer that MPI takes: from ``least`` to INT_MAX."""
    try:
        return least <= operator.index(number) <= INT_MAX
    except TypeError:
        return False
