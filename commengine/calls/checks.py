"""What can be seen to be wrong with a call on this rank alone, before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from commengine.dtypes import DTYPES, reduction_error
from commengine.errors import CollectiveError

#: a torch tensor, or an array that speaks DLPack (NumPy, CuPy): its memory is used, not copied
TensorLike: TypeAlias = Any

#: the largest C int: what MPI takes for a colour and a key
INT_MAX = 2**31 - 1


class ArgumentChecks:
    """The checks of a Communicator's arguments: each returns what the transport takes, or raises `CollectiveError`."""

    rank: int
    size: int
    name: str
    device: torch.device
    _backend: Any

    def _error(self, operation: str, problem: str) -> CollectiveError:
        return CollectiveError(f"rank {self.rank} of group {self.name!r} (size {self.size}): {operation}: {problem}")

    def _checked_tensor(self, operation: str, value: TensorLike, argument: str = "tensor") -> Tensor:
        tensor = value if isinstance(value, Tensor) else self._from_dlpack(operation, value, argument)
        here = tensor.is_cpu or tensor.device == self.device
        if here and tensor.layout is torch.strided and tensor.is_contiguous() and tensor.dtype in DTYPES:
            if tensor.is_neg():  # its memory holds the negated values
                raise self._error(operation, f"{argument} is a lazily negated view; call .resolve_neg() first")
            return tensor
        if not here:
            problem = f"lies on {tensor.device}, the communicator's device is {self.device}"
        elif tensor.layout is not torch.strided:
            problem = f"has layout {tensor.layout}; collectives need a dense (strided) tensor"
        elif not tensor.is_contiguous():
            problem = f"of shape {list(tensor.shape)} and strides {list(tensor.stride())} is not contiguous"
        else:
            names = ", ".join(sorted(str(d).removeprefix("torch.") for d in DTYPES))
            problem = f"has dtype {tensor.dtype}, which is not one of {names}"
        raise self._error(operation, f"{argument} {problem}")

    def _from_dlpack(self, operation: str, value: TensorLike, argument: str) -> Tensor:
        if not hasattr(value, "__dlpack__"):
            raise self._error(operation, f"{argument} is a {type(value).__name__}, not a tensor or DLPack array")
        # What torch.from_dlpack does not refuse: it makes read-only memory writable, and ends the process
        # at a negative stride.
        array = getattr(value, "__array_interface__", {})
        if array.get("data", (0, False))[1]:
            raise self._error(operation, f"{argument} is a read-only array; copy it first")
        if min(array.get("strides") or (0,)) < 0:
            raise self._error(operation, f"{argument} of strides {array['strides']} bytes is not contiguous")
        try:
            tensor: Tensor = torch.utils.dlpack.from_dlpack(value)
            return tensor
        except (BufferError, TypeError, RuntimeError) as error:
            raise self._error(operation, f"{argument} cannot be used through DLPack: {error}") from error

    def _checked_pair(
        self, operation: str, output: TensorLike, input: TensorLike, *, whole: str
    ) -> tuple[Tensor, Tensor]:
        """Check a call in which ``whole`` ("input" or "output") is ``size`` times the other along dim 0."""
        output = self._checked_tensor(operation, output, "output")
        input = self._checked_tensor(operation, input, "input")
        big, small = (input, output) if whole == "input" else (output, input)
        if output.dtype != input.dtype:
            raise self._error(operation, f"output is {output.dtype}, input {input.dtype}")
        self._check_whole(operation, whole, big, "output" if whole == "input" else "input", small)
        in_place = operation == "all_gather" and input.data_ptr() == output.data_ptr() + self.rank * input.nbytes
        if not in_place:
            self._check_disjoint(operation, output, input)
        return output, input

    def _root_tensor(
        self, operation: str, argument: str, value: TensorLike | None, part: Tensor, root: int
    ) -> Tensor | None:
        """Check the tensor that only ``root`` gives: ``size`` times ``part`` along dim 0."""
        if self.rank != root:
            return None
        if value is None:
            raise self._error(operation, f"{argument} is None on the root, rank {root}")
        tensor = self._checked_tensor(operation, value, argument)
        self._check_alike(operation, tensor, part)
        self._check_whole(operation, argument, tensor, "input" if argument == "output" else "output", part)
        return tensor

    def _check_whole(self, operation: str, big_name: str, big: Tensor, small_name: str, small: Tensor) -> None:
        rows = small.shape or (1,)  # a 0-d tensor is one row
        if big.shape != (rows[0] * self.size, *rows[1:]):
            raise self._error(
                operation,
                f"{big_name} {list(big.shape)} must be {small_name} {list(small.shape)} with dim 0 "
                f"times the group's size {self.size}",
            )

    def _check_alike(self, operation: str, one: Tensor, other: Tensor) -> None:
        if one.dtype != other.dtype:
            raise self._error(operation, f"the tensors are {one.dtype} and {other.dtype}")
        self._check_disjoint(operation, one, other)

    def _check_reduction(self, operation: str, tensor: Tensor, op: str) -> None:
        problem = reduction_error(tensor.dtype, op)
        if problem is None and not tensor.is_cpu:
            problem = self._backend.refusal(tensor.dtype, op)
        if problem is not None:
            raise self._error(operation, problem)

    def _check_disjoint(self, operation: str, one: Tensor, other: Tensor) -> None:
        if one.is_cpu != other.is_cpu:
            raise self._error(operation, f"the tensors lie on {one.device} and {other.device}")
        first, second = one.data_ptr(), other.data_ptr()
        if first < second + other.nbytes and second < first + one.nbytes:
            raise self._error(operation, "the tensors share memory")

    def _check_independent(self, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        """Check what one launch runs in any order: no call may touch what another one writes."""
        spans = []
        for number, (name, args) in enumerate(calls):
            for tensor, written in _touched(name, args):
                spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, written, number, name))
        spans = sorted(span for span in spans if span[0] < span[1])
        reach: dict[bool, tuple[int, int, str]] = {}  # of spans so far: (end, call, name), the furthest by written
        for start, end, written, number, name in spans:
            for theirs, (until, other, its_name) in reach.items():
                if start < until and number != other and (written or theirs):
                    problem = (
                        f"{its_name} and {name} of one block touch the same memory: on a device they have no order"
                    )
                    raise self._error("coalesce", problem)
            if end > reach.get(written, (0, 0, ""))[0]:
                reach[written] = (end, number, name)

    def _check_rank(self, operation: str, argument: str, rank: int) -> int:
        try:
            number = operator.index(rank)
        except TypeError:
            number = -1
        if not 0 <= number < self.size:
            raise self._error(operation, f"{argument}={rank!r} is not a rank of the group: 0 to {self.size - 1}")
        return number


def _touched(name: str, args: tuple[Any, ...]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors of a transport's call, and whether it writes them."""
    if name == "exchange":
        for verb, tensor, _ in args[0]:
            yield tensor, verb == "recv"
        return
    for position, value in enumerate(args):
        if isinstance(value, Tensor):
            yield value, position == 0  # (output, input) in all of them, or one tensor


def is_c_int(number: Any, least: int) -> bool:
    """Whether MPI takes ``number`` as an int that is at least ``least``."""
    try:
        return least <= operator.index(number) <= INT_MAX
    except TypeError:
        return False
