"""The ranks compare their tensors and arguments before an operator moves them, and all of them raise the error."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from commengine import Communicator
from commengine.calls.meeting import meet
from commengine.dtypes import COMPLEX_TYPES, FLOATING_TYPES

#: the dtypes that autograd differentiates; their places are what ranks tell each other
_DTYPES = sorted(FLOATING_TYPES | COMPLEX_TYPES.keys(), key=str)

#: dimensions of a tensor that the record has room for
_MOST_DIMENSIONS = 12


@dataclass(frozen=True)
class Compared:
    """The agreed properties of the ranks' tensors.

    shape: the root's, or that of every rank; along the dimension in which parts may differ it is this rank's.
    sizes: of the ranks' tensors along that dimension. on_host: where the tensors lie. requires_grad: on any rank.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    on_host: bool
    requires_grad: bool
    operation: str

    def dim(self, dim: int) -> int:
        """Return ``dim`` as an index from 0. Raises ValueError if the tensors have no such dimension."""
        if not -len(self.shape) <= dim < len(self.shape):
            raise ValueError(f"{self.operation}: a tensor of shape {list(self.shape)} has no dimension {dim}")
        return dim % len(self.shape)

    def empty(self, shape: Sequence[int], comm: Communicator) -> Tensor:
        """Return an uninitialised tensor of the agreed dtype, where the others lie."""
        return torch.empty(tuple(shape), dtype=self.dtype, device="cpu" if self.on_host else comm.device)


def compare(
    operation: str, x: Tensor | None, comm: Communicator, *, only: int | None = None, along: int | None = None,
    **arguments: object,
) -> Compared:  # fmt: skip
    """Compare the tensors and arguments of all ranks. Collective.

    only: the one rank whose tensor counts. along: the dimension in which the parts may have different sizes. arguments:
    those that must be equal on all ranks. Raises CollectiveMismatch on every rank if they, or the operations, differ,
    and ValueError on every rank if ``root`` among them is not in the group, the tensors do not fit together, or a rank
    has none.
    """
    words = f"{operation}({', '.join(f'{name}={_shown(value)}' for name, value in arguments.items())})"
    mine = [0] * (5 + _MOST_DIMENSIONS)
    if x is not None and x.dtype in _DTYPES and x.dim() <= _MOST_DIMENSIONS:
        mine[: 4 + x.dim()] = 1 + _DTYPES.index(x.dtype), int(wants_gradient(x)), int(x.is_cpu), x.dim(), *x.shape
    if only is not None and comm.rank != only:
        mine = [0] * len(mine)
    mine[-1] = zlib.crc32(words.encode())
    low, high = comm.extremes(mine)
    if low[-1] != high[-1]:
        comm.compare(words)
    if "root" in arguments:
        _check_root(operation, comm, arguments["root"])
    record = high  # of ``only``, as the others gave zeros
    dims = record[3]
    at = None if along is None or not -dims <= along < dims else along % dims
    # Whether a gradient is wanted, and the size along ``at``, may differ.
    differing = {1, None if at is None else 4 + at}
    unlike = any(low[place] != high[place] for place in range(len(mine)) if place not in differing)
    if not high[0] or (only is None and (not low[0] or unlike)):
        raise ValueError(_difference(operation, comm, mine, only, at))
    shape, sizes = record[4 : 4 + dims], tuple[int, ...]()
    if at is not None:
        alike = low[4 + at] == high[4 + at]
        sizes = (high[4 + at],) * comm.size if alike else tuple(comm.each_number(mine[4 + at]))
        shape[at] = mine[4 + at]
    return Compared(_DTYPES[record[0] - 1], tuple(shape), sizes, bool(record[2]), bool(high[1]), operation)


def _check_root(operation: str, comm: Communicator, root: object) -> None:
    try:
        fits = 0 <= operator.index(root) < comm.size  # type: ignore[arg-type]
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{operation}: root={root!r} is not a rank of the group: 0 to {comm.size - 1}")


def _shown(value: object) -> object:
    """An argument in words. Equal numbers have the same ones, in a list or in an array."""
    try:
        return [operator.index(one) for one in value]  # type: ignore[attr-defined]
    except TypeError:
        return value


def _difference(operation: str, comm: Communicator, mine: list[int], only: int | None, at: int | None) -> str:
    """Why the ranks' tensors do not fit together. Collective."""
    columns = [comm.each_number(number) for number in mine]
    records = list(zip(*columns, strict=True))
    for rank in range(comm.size) if only is None else [only]:
        if not records[rank][0]:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            return (
                f"{operation}: rank {rank} gave no tensor of at most {_MOST_DIMENSIONS} dimensions and one of the "
                f"dtypes {names}"
            )
    told = ", ".join(f"{list(r[4 : 4 + r[3]])} of {_DTYPES[r[0] - 1]}" for r in records[:16])
    except_in = "" if at is None else f" except in dimension {at}"
    return f"{operation}: the ranks' tensors must be alike{except_in}; by rank they are {told}"


def wants_gradient(x: Tensor) -> bool:
    """Whether autograd will follow what this rank does with ``x``, so that it takes part in a backward."""
    return x.requires_grad and torch.is_grad_enabled()


class _Calls:
    """The calls of operators on blocks over one communicator.

    known: the numbers of the operators, with their arguments, whose calls the ranks have compared. since: the calls
    since the ranks have compared which ones they made, and made: a number that follows from all of these.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], int] = {}
        self.since, self.made = 0, 0

    def note(self, number: int, varying: tuple[int, ...], comm: Communicator) -> None:
        """A call whose arguments are known. Ranks that call different ones learn it in one of the next calls."""
        self.since, self.made = self.since + 1, hash((self.made, number, varying))
        if self.since == _COMPARED_EVERY:
            self.since = 0
            comm.compare(f"the last {_COMPARED_EVERY} operators on blocks, whose digest is {self.made:x}")


#: calls after which the ranks compare which known operators they have called
_COMPARED_EVERY = 64

_CALLS: WeakKeyDictionary[Communicator, _Calls] = WeakKeyDictionary()


def compare_first(
    operation: str, x: Tensor, shape: Sequence[int] | None, comm: Communicator, arguments: Mapping[str, object],
    *, varying: tuple[int, ...] = (), said: str = "",
) -> None:  # fmt: skip
    """Compare the ranks' blocks and arguments if this is the first call of ``operation`` with ``arguments``.

    shape: of this rank's block; None: the ranks' tensors must have one shape. arguments: equal on all ranks. varying:
    numbers, equal on all ranks, that each call may change: no call is the first for them. said: some of these in words.

    Then it is collective. Raises CollectiveMismatch on every rank if the arguments, leading sizes, dtypes or
    ``requires_grad`` differ, or only some ranks have a wrong block. If the call is the first one for some ranks only,
    those that exchange messages with others raise an error (`meet`). Ranks whose calls are known to each of them, and
    are not the same, get it within 64 calls. A checked communicator compares at each call.
    """
    calls = _CALLS.get(comm)
    if calls is None:
        calls = _CALLS[comm] = _Calls()
    key = (operation, *arguments.values())
    number = calls.known.get(key)
    if number is not None and not comm.checked:
        calls.note(number, varying, comm)
        return
    told = [f"{name}={value}" for name, value in arguments.items()]
    if comm.checked and shape is not None:
        comm.compare("\n".join([operation + said, *told]))
        return  # `check_block` compares the blocks, where their shape is known
    lead = x.shape if shape is None else x.shape[: max(0, x.dim() - len(shape))]
    words = f"{operation}{said} of {str(x.dtype).removeprefix('torch.')} {list(lead)}"
    if shape is not None:
        fits = tuple(x.shape[len(lead) :]) == tuple(shape)
        words += " + the block" if fits else f" + a wrong block (the tensor is {list(x.shape)})"
    hint = " (without decomposition=, which blocks of different sizes need)" if shape is None else ""
    meet(comm, operation)
    comm.compare("\n".join([f"{words}, requires_grad={wants_gradient(x)}{hint}", *told]))
    calls.known[key] = zlib.crc32(repr(key).encode())


def taking_part(x: Tensor, given: Compared) -> Tensor:
    """Return ``x``, with a gradient on every rank or on none, because a backward needs every rank."""
    return x if x.requires_grad == given.requires_grad else x.detach().requires_grad_(given.requires_grad)


def placeholder(x: Tensor | None, shape: Sequence[int], given: Compared, comm: Communicator) -> Tensor:
    """Return a tensor without elements, the input of a rank that has none. It stays in the graph of ``x``, if any."""
    if x is None:
        return given.empty(shape, comm)
    return x.reshape(-1)[:0].to(given.dtype).view(tuple(shape))


def plain(x: Tensor) -> Tensor:
    """Return a contiguous copy whose memory holds its values: no lazily conjugated or negated view."""
    return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
