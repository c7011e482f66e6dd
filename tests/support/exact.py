"""Inputs of which every reduction is exact, the results, and switch points for always or never using shared memory."""

import torch

from commengine.dtypes import COMPLEX_TYPES, FLOATING_TYPES
from commengine.host.switch_points import KINDS, OPERATIONS, Key, Point, SwitchPoints

#: shared memory from the first byte on for up to 256 ranks on a node, and never
ALWAYS = SwitchPoints(
    {Key(name, kind, 2**n): Point(1, 1, 1) for name in OPERATIONS for kind in KINDS for n in range(1, 8)}
)
NEVER = SwitchPoints({})

OPS = ("sum", "prod", "min", "max", "avg")


def ops_of(dtype):
    """The reductions of a dtype."""
    if dtype in COMPLEX_TYPES:
        return ("sum", "prod", "avg")
    return OPS if dtype in FLOATING_TYPES else OPS[:4]


def values(dtype, numel, rank):
    """Small whole numbers, different on every rank: every sum and product of them is exact."""
    found = (torch.arange(numel) * (rank + 3)) % 5 - (0 if dtype in (torch.uint8, torch.bool) else 2)
    if dtype in COMPLEX_TYPES:
        return torch.complex(found.to(COMPLEX_TYPES[dtype]), found.flip(0).to(COMPLEX_TYPES[dtype]))
    return found.to(dtype)


def expected(dtype, numel, size, op):
    """The result of reducing the `values` of all ranks."""
    parts = torch.stack([values(dtype, numel, rank) for rank in range(size)])
    if dtype == torch.bool:
        return parts.any(0) if op in ("sum", "max") else parts.all(0)
    wide = parts.cdouble() if dtype in COMPLEX_TYPES else parts.double() if dtype.is_floating_point else parts
    if op == "avg":
        return wide.mean(0).to(dtype)
    return getattr(wide, {"max": "amax", "min": "amin"}.get(op, op))(0).to(dtype)


def in_pairs(parts):
    """The sum in a binary tree: of the halves of a power of two of parts, each added up in the same way."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << (len(parts) - 1).bit_length() - 1
    return in_pairs(parts[:half]) + in_pairs(parts[half:])
