"""Shifts, halo exchange and its transposed operator on the blocks of a Cartesian grid."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from commengine import CartesianGrid, Decomposition

from .compared import compare_first
from .plan import BlockPart, TransferPlan, halo_plan
from .transfer import transfer, transfer_adjoint

#: one width for all ends of all axes; or for each axis one width, or (low, high)
Widths = int | Sequence[int | tuple[int, int]]


def halo_exchange(
    x: Tensor,
    grid: CartesianGrid,
    widths: Widths,
    *,
    decomposition: Decomposition | None = None,
    padding: str | Sequence[str] | None = None,
) -> Tensor:
    """Put strips of the neighbours' blocks around ``x``, edges and corners included.

    x: this rank's block [..., space]; the last dimensions are the axes of the grid.
    widths: the points to add at the two ends of each axis: one number, or for each axis a number or (low, high). A halo
        may be wider than the neighbours' blocks: then several ranks deliver it.
    decomposition: the blocks of all ranks. None: the ranks tell each other their shapes, at each call.
    padding: what stands beyond the physical borders, as PyTorch's ``padding_mode``: "zeros", "circular", "reflect" or
        "replicate"; one for each axis, or one for all. None: "circular" on periodic axes, "zeros" on the others.

    Returns a tensor that is larger than ``x`` by the widths. Every rank of the grid must call it with the same widths
    and padding, and leading sizes and a dtype that are the same everywhere. The backward is `halo_accumulate`. Raises
    ValueError if the widths, the padding or the shape of ``x`` do not fit the decomposition (Hewett and Grady 2020,
    section 3, "generalized halo exchange").
    At the first call with a decomposition the ranks compare, and raise CollectiveMismatch if a rank differs.
    """
    decomposition = grid.decomposition_of(x.shape[-len(grid.shape) :]) if decomposition is None else decomposition
    plan = plan_halo(grid, decomposition, widths, padding)
    compare_first("halo_exchange", x, plan.source_shape, grid.comm, decomposition)
    return transfer(x, plan, grid.comm)


def halo_accumulate(
    y: Tensor,
    grid: CartesianGrid,
    widths: Widths,
    *,
    decomposition: Decomposition,
    padding: str | Sequence[str] | None = None,
) -> Tensor:
    """Add the strips around a block to the blocks that they came from: the transposed operator of `halo_exchange`.

    y: a block with its halo, [..., space]. The result is the block without the halo. The other arguments are those of
    `halo_exchange`, which is the backward. A solver uses it to assemble what its ranks added beyond their borders.
    """
    plan = plan_halo(grid, decomposition, widths, padding)
    compare_first("halo_accumulate", y, plan.target_shape, grid.comm, decomposition)
    return transfer_adjoint(y, plan, grid.comm)


def shift(
    x: Tensor, grid: CartesianGrid, axis: int, step: int = 1, *, decomposition: Decomposition | None = None
) -> Tensor:
    """Send the block to the rank ``step`` places further along ``axis``, and return the block that arrives.

    x: [..., space]. decomposition: the blocks of all ranks; None: all blocks have the shape of ``x``. Where no rank
    stands (the grid is not periodic), the result is zeros of the shape of ``x``. The ranks compare their tensors at the
    first shift on the grid with this decomposition, or with none, and raise CollectiveMismatch if they do not fit.
    """
    axis = grid.check_axis(axis)
    shape = tuple(x.shape[x.dim() - len(grid.shape) :])
    to, source = grid.neighbour(axis, step), grid.neighbour(axis, -step)

    def whole(rank: int) -> BlockPart:
        extents = shape if decomposition is None else decomposition.local_shape(grid.coords_at(rank))
        spans = (..., *(slice(0, extent) for extent in extents))
        return BlockPart(spans, spans, tuple(extents), (), ())

    arriving = shape if source is None else whole(source).shape
    if to == grid.rank:
        plan = TransferPlan(shape, shape, (), (), (whole(grid.rank),), True)
    else:
        sends = () if to is None else ((to, (whole(grid.rank),)),)
        receives = () if source is None else ((source, (whole(source),)),)
        plan = TransferPlan(whole(grid.rank).shape, arriving, sends, receives, (), source is not None)
    block = None if decomposition is None else plan.source_shape
    compare_first("shift", x, block, grid.comm, grid.shape, decomposition)
    return transfer(x, plan, grid.comm)


def plan_halo(
    grid: CartesianGrid, decomposition: Decomposition, widths: Widths, padding: str | Sequence[str] | None = None
) -> TransferPlan:
    """Return the plan of a halo exchange, for `transfer`: a program that repeats an exchange makes its plan once.

    The arguments are those of `halo_exchange`. Not collective.
    """
    axes = len(grid.shape)
    if decomposition.grid_shape != grid.shape:
        raise ValueError(f"a decomposition for a grid of shape {list(decomposition.grid_shape)} does not fit {grid}")
    pairs = [widths] * axes if isinstance(widths, int) else list(widths)
    ends = [(width, width) if isinstance(width, int) else tuple(width) for width in pairs]
    if len(ends) != axes or any(len(pair) != 2 or min(pair) < 0 for pair in ends):
        raise ValueError(f"widths={widths!r} must be numbers of at least 0: one, or one or two for each of {axes} axes")
    if padding is None:
        padding = ["circular" if periodic else "zeros" for periodic in grid.periodic]
    padding = [padding] * axes if isinstance(padding, str) else list(padding)
    ranges = decomposition.halo_ranges([(low, high) for low, high in ends])
    return halo_plan(decomposition, grid.rank, ranges, padding)
