"""The table of dtypes: the MPI datatype and the NCCL code of each torch dtype, and how it is reduced.

On the host:

| dtype              | reduction                                                                                   |
|--------------------|---------------------------------------------------------------------------------------------|
| float64, float32   | by MPI, in that precision; through a node's memory in rank order                            |
| float16, bfloat16  | by torch, in float32 in rank order, rounded once                                            |
| int8, uint8, int16 | by torch, in rank order; wraps around, while Open MPI 5 saturates; no ``avg``               |
| int32, int64       | by MPI; wraps around as torch does; no ``avg``                                              |
| bool               | ``sum`` and ``max`` are *or*, ``prod`` and ``min`` are *and*; no ``avg``                    |
| complex64, ...128  | as float32 and float64; no ``min`` and no ``max``, because complex numbers have no order    |

``max`` and ``min`` of NaN are unspecified in float32 and float64 (MPI leaves them open). In float16 and bfloat16 (the
*halves*) NaN wins. torch reduces the halves because MPI has no bfloat16 (mpi4py sends its bytes, and MPICH's extension
rounds at every step), and because MPI's float16 is slow.

On a device NCCL reduces every dtype in its own precision; it chooses the order and the roundings of the halves. bool is
reduced as on the host. NCCL has no type for int16 and cannot reduce it. It has no complex types either: complex numbers
are added as twice as many real ones, and cannot be multiplied. Operations that only move data move bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mpi4py import MPI

REDUCTIONS = ("sum", "prod", "min", "max", "avg")

#: the words before a reduction's name that make it a reduction in a binary tree (`reduce_unseen`); transports and
#: routes pass such a name on, and no caller of a Communicator gives it
TREE = "tree_"

HALF_TYPES = frozenset({torch.float16, torch.bfloat16})

#: a reduction that needs memory beside its output works on this many elements at a time: they stay in the caches, and
#: malloc keeps the memory
SCRATCH_ELEMENTS = 128 * 1024

#: the dtypes that torch reduces, in rank order, and not MPI
OUR_TYPES = HALF_TYPES | {torch.int8, torch.uint8, torch.int16}

FLOATING_TYPES = frozenset({torch.float64, torch.float32}) | HALF_TYPES

#: the complex dtypes, and their parts
COMPLEX_TYPES = {torch.complex64: torch.float32, torch.complex128: torch.float64}

REAL_TYPES = FLOATING_TYPES | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool}

DTYPES = REAL_TYPES | COMPLEX_TYPES.keys()

#: NCCL's codes (ncclDataType_t). There is none for 16-bit integers; a bool is a byte that is 0 or 1
_NCCL_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.bool: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_NCCL_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_NCCL_BOOL_OPS = {"sum": 2, "max": 2, "prod": 3, "min": 3}

#: the code for plain bytes
NCCL_BYTE = _NCCL_TYPES[torch.uint8]

#: (dtype, reduction) -> (ncclDataType_t, ncclRedOp_t). A complex tensor is passed as twice as many reals
NCCL_REDUCTIONS = {
    (dtype, name): (code, op)
    for dtype, code in _NCCL_TYPES.items()
    for name, op in (_NCCL_BOOL_OPS if dtype is torch.bool else _NCCL_OPS).items()
    if name != "avg" or dtype in FLOATING_TYPES
} | {(dtype, op): (_NCCL_TYPES[part], _NCCL_OPS[op]) for dtype, part in COMPLEX_TYPES.items() for op in ("sum", "avg")}


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, in float32 if it is in half precision."""
    return tensor.float() if tensor.dtype in HALF_TYPES else tensor


class MpiTypes:
    """The MPI side of the table, made on demand: reading mpi4py's constants starts MPI in some set-ups."""

    def __init__(self, mpi: Any) -> None:
        unsigned = {1: mpi.UINT8_T, 2: mpi.UINT16_T, 4: mpi.UINT32_T, 8: mpi.UINT64_T}
        complexes = {torch.complex64: mpi.C_FLOAT_COMPLEX, torch.complex128: mpi.C_DOUBLE_COMPLEX}
        #: the datatype that moves a dtype without computing: an unsigned integer of the same width, if MPI has one
        self.move: dict[torch.dtype, MPI.Datatype] = {d: unsigned[d.itemsize] for d in REAL_TYPES} | complexes
        #: the tag of a message, which says its dtype
        self.tag: dict[torch.dtype, int] = {dtype: tag for tag, dtype in enumerate(sorted(DTYPES, key=str), 1)}
        native = {
            torch.float64: mpi.DOUBLE,
            torch.float32: mpi.FLOAT,
            torch.int32: mpi.INT32_T,
            torch.int64: mpi.INT64_T,
        }
        ops = {"sum": mpi.SUM, "prod": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX}
        #: (dtype, reduction) -> (MPI datatype, MPI operation), if MPI reduces it. ``avg`` is a sum, then a division
        self.reduce: dict[tuple[torch.dtype, str], tuple[MPI.Datatype, MPI.Op]] = {
            (dtype, name): (datatype, op) for dtype, datatype in native.items() for name, op in ops.items()
        }
        for dtype, datatype in complexes.items():
            self.reduce |= {(dtype, name): (datatype, ops[name]) for name in ("sum", "prod")}
        for dtype, datatype in {torch.float32: mpi.FLOAT, torch.float64: mpi.DOUBLE, **complexes}.items():
            self.reduce[dtype, "avg"] = (datatype, mpi.SUM)
        for name, op in {"sum": mpi.MAX, "max": mpi.MAX, "prod": mpi.MIN, "min": mpi.MIN}.items():
            self.reduce[torch.bool, name] = (mpi.UINT8_T, op)

    def of_tag(self, tag: int) -> torch.dtype | None:
        """Return the dtype of a message with this tag; None if it carries no tensor."""
        return next((dtype for dtype, its in self.tag.items() if its == tag), None)


_STEPS: dict[str, Any] = {
    "sum": torch.add, "avg": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum,
}  # fmt: skip


#: the names of a sum, the reductions that round, and the dtypes in which they do: of others no order changes the result
_SUMS, _ROUNDED, _ROUNDING_TYPES = ("sum", TREE + "sum"), ("sum", "prod", "avg"), FLOATING_TYPES | COMPLEX_TYPES.keys()


def reduction_error(dtype: torch.dtype, op: object) -> str | None:
    """Return why ``op`` cannot reduce ``dtype``, in words for an error message, or None if it can."""
    if op == "sum":  # of every dtype: the most frequent reduction takes no other comparison
        return None
    if op not in REDUCTIONS:
        return f"op={op!r} is not one of {', '.join(REDUCTIONS)}"
    if dtype in COMPLEX_TYPES:
        return None if op in ("prod", "avg") else f"op={op!r} needs an order, which {dtype} has not: reduce magnitudes"
    if op == "avg" and dtype not in FLOATING_TYPES:
        return f"op='avg' needs a floating-point tensor, not {dtype}: sum it and divide as you need"
    return None


def reduce_in_order(parts: Sequence[torch.Tensor] | torch.Tensor, op: str, out: torch.Tensor) -> torch.Tensor:
    """Reduce ``parts`` in their order into ``out``, and return ``out``.

    parts: tensors of one shape and dtype. out: of that shape; it may be one of the parts. Halves are reduced in float32
    and rounded once. The fixed order makes the result the same on every rank and in every run. Autograd does not see
    the reduction.

    op: a reduction, or `TREE` and its name: then pairs of neighbours are reduced, then pairs of these results, and so
    on; a result without a neighbour waits for the next round. Every pair is rounded to the dtype of the parts. So 2^k
    neighbours that one rank has already reduced in this way can stand for themselves in a tree over more parts.
    """
    with torch.inference_mode():
        return reduce_unseen(parts, op, out)


_NOTHING = contextlib.nullcontext()


def unseen(written: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return the context in which torch may write ``written``, which is ``.data`` of a tensor of a user.

    A tensor that was made in inference mode can be written only there. Another tensor does not need the mode, because
    autograd does not see its ``.data``.
    """
    return torch.inference_mode() if written.is_inference() else _NOTHING


def reduce_unseen(parts: Sequence[torch.Tensor] | torch.Tensor, op: str, out: torch.Tensor) -> torch.Tensor:
    """`reduce_in_order` for tensors that autograd does not see: ``.data`` of a tensor, inside `unseen`, for example.

    Entering inference mode takes longer than adding a few kilobytes.
    """
    if isinstance(parts, torch.Tensor):
        parts = parts.unbind()  # in one call: taking one row out of a tensor costs a microsecond
    if len(parts) == 1:
        return out.copy_(parts[0])
    if len(parts) == 2 and op in _SUMS and parts[0].dtype == out.dtype != torch.bool:
        return torch.add(parts[0], parts[1], out=out)  # a short cut: the code below would end in this line
    if op.startswith(TREE):
        op = op.removeprefix(TREE)
        if op in _ROUNDED and out.dtype in _ROUNDING_TYPES:
            return _reduce_in_tree(parts, op, out)
    if out.dtype == torch.bool:
        op = {"sum": "max", "prod": "min"}.get(op, op)
        reduce_unseen([part.view(torch.uint8) for part in parts], op, out.view(torch.uint8))
        return out
    total = out
    # torch adds two halves in float32, so a sum of two needs no scratch memory. Other reductions of halves need it. So
    # does an output that is also the third part or a later one: the output is written before that part is read.
    if (out.dtype in HALF_TYPES and (op != "sum" or len(parts) > 2)) or any(
        part.data_ptr() == out.data_ptr() for part in parts[2:]
    ):
        if out.numel() > SCRATCH_ELEMENTS:
            return _in_blocks(reduce_unseen, parts, op, out)
        total = out.new_empty(out.shape, dtype=torch.float32 if out.dtype in HALF_TYPES else out.dtype)
    step = _STEPS[op]
    step(parts[0].to(total.dtype), parts[1], out=total)
    for part in parts[2:]:
        step(total, part, out=total)
    if op == "avg":
        total /= len(parts)
    return out if total is out else out.copy_(total)


def _in_blocks(
    reduce: Callable[..., object], parts: Sequence[torch.Tensor], op: str, out: torch.Tensor
) -> torch.Tensor:
    rows = [torch.split(row.reshape(-1), SCRATCH_ELEMENTS) for row in (out, *parts)]
    for block, *operands in zip(*rows, strict=True):
        reduce(operands, op, block)
    return out


def _reduce_in_tree(parts: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> torch.Tensor:
    """`reduce_unseen` in a binary tree, of a dtype that rounds."""
    if out.numel() > SCRATCH_ELEMENTS:
        return _in_blocks(_reduce_in_tree, parts, op, out)
    step = _STEPS[op]
    pairs = list(parts)
    while len(pairs) > 2:
        left, right = pairs[::2], pairs[1::2]
        reduced = [step(one, other) for one, other in zip(left, right, strict=False)]
        pairs = reduced + left[len(reduced) :]
    total = step(pairs[0], pairs[1])
    if op == "avg":
        total /= len(parts)
    return out.copy_(total)
