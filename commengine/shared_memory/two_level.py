"""Reductions of a group that spans nodes: inside each node in memory, between nodes by MPI.

Rank i of a node reduces the i-th slice over its node, then with the i-th ranks of the other nodes: all slices are on
their way at once, and the bytes between two nodes are those of one rank a node, not of all (hierarchical all-reduce).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, float32, inference_mode

from commengine.dtypes import HALF_TYPES

from .slots import Bounce
from .window_collectives import InWindow
from .windows import Place

if TYPE_CHECKING:
    from commengine.host.transport import HostTransport


class TwoLevel:
    """What one lane needs for it.

    bounce: None where the node has no memory for it: every tensor then has a place. across: between the ranks of one
    slice, in the order of the nodes. table: [node][rank in it] -> rank in the group. rank: of this one in its node.
    """

    def __init__(
        self, window: InWindow, bounce: Bounce | None, across: HostTransport, table: list[list[int]], rank: int
    ) -> None:
        self._window, self._bounce, self._across, self._table, self._rank = window, bounce, across, table, rank
        self._size = sum(map(len, table))

    def all_reduce(self, flat: Tensor, rows: Sequence[slice], place: Place | None, op: str) -> None:
        """Reduce a flat tensor, row i by the i-th rank of each node. Halves are summed in float32 and rounded once."""
        own = flat[rows[self._rank]]
        with inference_mode():
            if own.dtype not in HALF_TYPES:
                self._reduce(own, flat, rows, place, op)
                self._across.all_reduce(own, _step(op))
                if op == "avg":
                    own /= self._size
            else:
                # A multiple of the nodes: what is beyond the row is never looked at.
                nodes = len(self._table)
                total = own.new_empty(-(-own.numel() // nodes) * nodes, dtype=float32)
                self._reduce(total[: own.numel()], flat, rows, place, op)
                part = total.new_empty(total.numel() // nodes)
                self._across.reduce_scatter(part, total, _step(op))
                if op == "avg":
                    part /= self._size
                gathered = own.new_empty(total.numel())
                self._across.all_gather(gathered, part.to(own.dtype))
                own.copy_(gathered[: own.numel()])
        if place is not None:
            self._window.gather_into(place, rows[self._rank], own)
        elif self._bounce is not None:
            self._bounce.all_gather([flat[row] for row in rows])

    def reduce_scatter(self, output: Tensor, flat: Tensor, place: Place | None, op: str) -> None:
        """Reduce block r of a flat tensor into rank r's flat ``output``."""
        numel, half = output.numel(), output.dtype in HALF_TYPES
        with inference_mode():
            # For the ranks of this slice on every node: what this node has for them.
            totals = output.new_empty((len(self._table), numel), dtype=float32 if half else None)
            for total, ranks in zip(totals, self._table, strict=True):
                self._reduce(total, flat, [slice(rank * numel, (rank + 1) * numel) for rank in ranks], place, op)
            result = totals.new_empty(numel) if half else output
            self._across.reduce_scatter(result, totals, _step(op))
            if op == "avg":
                result /= self._size
            if half:
                output.copy_(result)

    def _reduce(self, output: Tensor, flat: Tensor, rows: Sequence[slice], place: Place | None, op: str) -> None:
        """Inside the node, row i by its i-th rank."""
        if place is not None:
            self._window.reduce_scatter(output, place, rows[self._rank], _step(op))
        elif self._bounce is not None:
            self._bounce.reduce_scatter(output, [flat[row] for row in rows], _step(op))


def _step(op: str) -> str:
    """What both levels do: a mean is divided once, at the end."""
    return "sum" if op == "avg" else op
