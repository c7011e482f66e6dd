"""Shifts, rolls, flips, halo exchange and its transposed operator on the blocks of a Cartesian grid."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from commengine import CartesianGrid, Decomposition
from tplayers.functions import outside_graphs

from .compared import compare_first
from .plan import BlockPart, TransferPlan, halo_plan
from .transfer import transfer, transfer_adjoint

#: one width for all ends of all axes; or for each axis one width, or (low, high)
Widths = int | Sequence[int | tuple[int, int]]
_Ends: TypeAlias = "int | tuple[int | tuple[int, ...], ...]"


@outside_graphs
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
    At the first call with its arguments the ranks compare these and their blocks, and raise CollectiveMismatch if a
    rank differs. From then on every 64th call compares which operators on blocks the ranks have called.
    """
    if decomposition is None:
        decomposition = grid.decomposition_of(x.shape[-len(grid.shape) :])
    fixed = _fixed(widths, padding)
    plan = _plan_halo(decomposition, tuple(grid.shape), grid.periodic, grid.rank, *fixed)
    _compare_halo("halo_exchange", x, plan.source_shape, grid, decomposition, *fixed)
    return transfer(x, plan, grid.comm)


@outside_graphs
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
    fixed = _fixed(widths, padding)
    plan = _plan_halo(decomposition, tuple(grid.shape), grid.periodic, grid.rank, *fixed)
    _compare_halo("halo_accumulate", y, plan.target_shape, grid, decomposition, *fixed)
    return transfer_adjoint(y, plan, grid.comm)


@outside_graphs
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
    compare_first(
        "shift", x, block, grid.comm, {"decomposition": decomposition, **_places(grid), "axis": axis, "step": step}
    )
    return transfer(x, plan, grid.comm)


@outside_graphs
def roll(
    x: Tensor,
    grid: CartesianGrid,
    shifts: int | Sequence[int],
    axes: int | Sequence[int],
    *,
    decomposition: Decomposition | None = None,
) -> Tensor:
    """Move a field by ``shifts`` points along ``axes`` of the grid; it wraps around: torch.roll of the whole field.

    x: this rank's block [..., space]. shifts, axes: one number each, or as many of the one as of the other; the shifts
        of an axis that is named twice are added. decomposition: the blocks of all ranks, and of the result. None: the
        ranks tell each other their shapes, at each call.

    The field wraps around on axes on which the grid is not periodic, too. Collective over the grid; the backward rolls
    by the opposite shifts. Raises ValueError if the numbers of shifts and axes differ, or ``x`` is not this rank's
    block; CollectiveError for an axis that the grid does not have. The ranks compare as in `halo_exchange`.
    """
    moves = [shifts] if isinstance(shifts, int) else list(shifts)
    along = [axes] if isinstance(axes, int) else list(axes)
    if len(moves) != len(along):
        raise ValueError(f"roll: shifts={shifts!r} and axes={axes!r} must be equally many")
    blocks = _blocks(x, grid, decomposition)
    by = [0] * len(grid.shape)
    for move, axis in zip(moves, map(grid.check_axis, along), strict=True):
        by[axis] = (by[axis] + move) % max(blocks.shape[axis], 1)
    # The blocks of the field that begins ``by`` points before it; before it stand its last points.
    ranges = blocks.halo_ranges([(move, -move) for move in by])
    plan = halo_plan(blocks, grid.rank, ranges, ["circular"] * len(by))
    arguments = {"decomposition": blocks, **_places(grid)}
    compare_first("roll", x, plan.source_shape, grid.comm, arguments, varying=tuple(by), said=f" by {by}")
    return transfer(x, plan, grid.comm)


@outside_graphs
def flip(
    x: Tensor, grid: CartesianGrid, axes: int | Sequence[int], *, decomposition: Decomposition | None = None
) -> Tensor:
    """Reverse the order of a field's points along ``axes`` of the grid: torch.flip of the whole field.

    x: this rank's block [..., space]. axes: one, or several, each once. decomposition: as of `roll`.

    Collective over the grid; it is its own backward. Raises ValueError if an axis is named twice, or ``x`` is not this
    rank's block; CollectiveError for an axis that the grid does not have. The ranks compare as in `halo_exchange`.
    """
    along = [grid.check_axis(axis) for axis in ([axes] if isinstance(axes, int) else axes)]
    if len(set(along)) < len(along):
        raise ValueError(f"flip: axes={axes!r} must name an axis once at most")
    blocks = _blocks(x, grid, decomposition)
    # Of an axis that is reflected about its first point, the blocks that end with this point.
    ends = [points - 1 if axis in along else 0 for axis, points in enumerate(blocks.shape)]
    padding = ["reflect" if axis in along else "zeros" for axis in range(len(ends))]
    plan = halo_plan(blocks, grid.rank, blocks.halo_ranges([(end, -end) for end in ends]), padding)
    arguments = {"decomposition": blocks, **_places(grid), "axes": tuple(sorted(along))}
    compare_first("flip", x, plan.source_shape, grid.comm, arguments, said=f" along {sorted(along)}")
    return transfer(x, plan, grid.comm)


def _places(grid: CartesianGrid) -> dict[str, object]:
    return {"grid": tuple(grid.shape), "periodic": tuple(grid.periodic)}


def _compare_halo(
    operation: str, x: Tensor, shape: tuple[int, ...], grid: CartesianGrid, decomposition: Decomposition,
    widths: _Ends, padding: str | tuple[str, ...] | None,
) -> None:  # fmt: skip
    arguments = {"decomposition": decomposition, **_places(grid), "widths": widths, "padding": padding}
    compare_first(operation, x, shape, grid.comm, arguments)


def _blocks(x: Tensor, grid: CartesianGrid, decomposition: Decomposition | None) -> Decomposition:
    """``decomposition``, or that of the shapes that the ranks tell each other."""
    if decomposition is None:
        return grid.decomposition_of(x.shape[-len(grid.shape) :])
    _check_grid(decomposition, tuple(grid.shape))
    return decomposition


def _check_grid(decomposition: Decomposition, shape: tuple[int, ...]) -> None:
    if decomposition.grid_shape != shape:
        raise ValueError(
            f"a decomposition for a grid of shape {list(decomposition.grid_shape)} does not fit one of {list(shape)}"
        )


def plan_halo(
    grid: CartesianGrid, decomposition: Decomposition, widths: Widths, padding: str | Sequence[str] | None = None
) -> TransferPlan:
    """Return the plan of a halo exchange, for `transfer`: a program that repeats an exchange makes its plan once.

    The arguments are those of `halo_exchange`; the decomposition must be given. The plan holds for every dtype, and for
    any leading sizes. Not collective. Raises ValueError if the decomposition is of another grid, the widths or the
    padding do not fit it, or an axis has too few points for its padding (`halo_plan`).
    """
    return _plan_halo(decomposition, tuple(grid.shape), grid.periodic, grid.rank, *_fixed(widths, padding))


def _fixed(widths: Widths, padding: str | Sequence[str] | None) -> tuple[_Ends, str | tuple[str, ...] | None]:
    """Return the arguments as something that has a hash."""
    ends = widths if isinstance(widths, int) else tuple(one if isinstance(one, int) else tuple(one) for one in widths)
    return ends, padding if padding is None or isinstance(padding, str) else tuple(padding)


@functools.lru_cache(maxsize=128)  # halos stand inside of steps
def _plan_halo(
    decomposition: Decomposition, shape: tuple[int, ...], periodic: tuple[bool, ...], rank: int, widths: _Ends,
    padding: str | tuple[str, ...] | None,
) -> TransferPlan:  # fmt: skip
    axes = len(shape)
    _check_grid(decomposition, shape)
    pairs = [widths] * axes if isinstance(widths, int) else list(widths)
    ends = [(width, width) if isinstance(width, int) else width for width in pairs]
    if len(ends) != axes or any(len(pair) != 2 or min(pair) < 0 for pair in ends):
        said = widths if isinstance(widths, int) else list(widths)
        raise ValueError(f"widths={said} must be numbers of at least 0: one, or one or two for each of {axes} axes")
    if padding is None:
        padding = tuple("circular" if wraps else "zeros" for wraps in periodic)
    paddings = [padding] * axes if isinstance(padding, str) else list(padding)
    return halo_plan(decomposition, rank, decomposition.halo_ranges([(low, high) for low, high in ends]), paddings)
