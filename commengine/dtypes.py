"""torch dtype <-> MPI datatype, and how each dtype is reduced. The only table of its kind.

==================  =====================================================================================
dtype               reduction
==================  =====================================================================================
float64, float32    MPI's own, in that precision
float16, bfloat16   summed in float32 in rank order and rounded once: MPI has no bfloat16 (mpi4py sends its
                    bytes, and MPICH's extension rounds at every step), and its float16 is slow
int8 ... int64,     MPI's own; wraps around as torch does; no ``avg``
uint8
bool                ``sum`` and ``max`` are *or*, ``prod`` and ``min`` are *and*; no ``avg``
==================  =====================================================================================

``max`` and ``min`` of NaN are unspecified in float32 and float64 (MPI leaves them open); NaN wins in the halves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mpi4py import MPI

REDUCTIONS = ("sum", "prod", "min", "max", "avg")

HALF_TYPES = frozenset({torch.float16, torch.bfloat16})

FLOATING_TYPES = frozenset({torch.float64, torch.float32}) | HALF_TYPES

DTYPES = FLOATING_TYPES | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool}


class MpiTypes:
    """The MPI side of the table. An object, because reading mpi4py's constants starts MPI in some set-ups."""

    def __init__(self, mpi: Any) -> None:
        unsigned = {1: mpi.UINT8_T, 2: mpi.UINT16_T, 4: mpi.UINT32_T, 8: mpi.UINT64_T}
        #: what carries a dtype where nothing is computed: an unsigned integer of the same width, bfloat16 included
        self.move: dict[torch.dtype, MPI.Datatype] = {d: unsigned[d.itemsize] for d in DTYPES}
        native = {
            torch.float64: mpi.DOUBLE,
            torch.float32: mpi.FLOAT,
            torch.int8: mpi.INT8_T,
            torch.int16: mpi.INT16_T,
            torch.int32: mpi.INT32_T,
            torch.int64: mpi.INT64_T,
            torch.uint8: mpi.UINT8_T,
        }
        ops = {"sum": mpi.SUM, "prod": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX}
        #: (dtype, reduction) -> (MPI datatype, MPI operation) where MPI itself reduces; ``avg``: a sum, then a division
        self.reduce: dict[tuple[torch.dtype, str], tuple[MPI.Datatype, MPI.Op]] = {
            (dtype, name): (datatype, op) for dtype, datatype in native.items() for name, op in ops.items()
        }
        for dtype in (torch.float32, torch.float64):
            self.reduce[dtype, "avg"] = (native[dtype], mpi.SUM)
        for name, op in {"sum": mpi.MAX, "max": mpi.MAX, "prod": mpi.MIN, "min": mpi.MIN}.items():
            self.reduce[torch.bool, name] = (mpi.UINT8_T, op)


def reduction_error(dtype: torch.dtype, op: object) -> str | None:
    """Why ``op`` cannot reduce ``dtype``, in words for an error message, or None when it can."""
    if op not in REDUCTIONS:
        return f"op={op!r} is not one of {', '.join(REDUCTIONS)}"
    if op == "avg" and dtype not in FLOATING_TYPES:
        return f"op='avg' needs a floating-point tensor, not {dtype}: sum it and divide as you need"
    return None


def reduce_halves(parts: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce float16 or bfloat16 ``parts`` [n, ...] over dim 0, in float32 and in rank order; round once.

    The order makes the result the same on every rank and in every run.
    """
    if len(parts) == 2 and op == "sum":
        return torch.add(parts[0], parts[1])  # torch adds two halves in float32 and rounds once
    total = parts[0].float()
    for part in parts[1:]:
        if op == "prod":
            total *= part
        elif op == "min":
            torch.minimum(total, part.float(), out=total)
        elif op == "max":
            torch.maximum(total, part.float(), out=total)
        else:
            total += part
    if op == "avg":
        total /= len(parts)
    return total.to(parts.dtype)
