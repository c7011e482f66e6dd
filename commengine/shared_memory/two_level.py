"""Reductions of a group that spans nodes: inside each node in shared memory, between nodes by MPI.

The tensor is cut into one slice for each rank of a node. Rank i of each node reduces slice i over its node, then with
the ranks i of the other nodes. So all slices travel at once, and a node sends the bytes of one tensor instead of the
bytes of one tensor for each of its ranks (hierarchical all-reduce).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, float32, inference_mode

from commengine.dtypes import HALF_TYPES, TREE

from .slots import Bounce
from .window_collectives import InWindow
from .windows import WindowTensor


class AcrossNodes(Protocol):
    """The transport between the ranks of one slice, one on each node: `commengine.host.transport.HostTransport`."""

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Reduce ``tensor`` over the nodes, in place."""

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> None:
        """Reduce ``input`` over the nodes; each node gets its rows in ``output``."""

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """Concatenate every node's ``input`` into ``output``."""


class TwoLevel:
    """The two-level reductions of one sequence of collectives.

    window, bounce: reduce inside the node tensors in windows, and private ones. bounce is None if a node has no memory
        for slots; every tensor then has a place in a window.
    across: moves data between the ranks of one slice, in the order of the nodes.
    table: [node][rank in the node] -> rank in the group. rank: this rank's number in its node.
    """

    def __init__(
        self, window: InWindow, bounce: Bounce | None, across: AcrossNodes, table: list[list[int]], rank: int
    ) -> None:
        self._window, self._bounce, self._across, self._table, self._rank = window, bounce, across, table, rank
        self._size = sum(map(len, table))

    def all_reduce(self, flat: Tensor, rows: Sequence[slice], place: WindowTensor | None, op: str) -> None:
        """Reduce a flat tensor over the group, in place; the i-th rank of each node reduces row i.

        place: the tensor's place in a window, or None. float16 and bfloat16 are summed in float32 and rounded once; in
        a tree they are rounded at every pair. ``across`` reduces in a tree, too, if ``op`` does.
        """
        own = flat[rows[self._rank]]
        with inference_mode():
            if own.dtype not in HALF_TYPES or op.startswith(TREE):
                self._reduce(own, flat, rows, place, op)
                self._across.all_reduce(own, _step(op).removeprefix(TREE))
                if op.endswith("avg"):
                    own /= self._size
            else:
                # The length is a multiple of the number of nodes; nobody reads the elements beyond the row.
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
            row = rows[self._rank]
            self._window.gather_into(place, row.start, row.stop, own)
        elif self._bounce is not None:
            bounds = [0, *(row.stop * flat.itemsize for row in rows)]
            self._bounce.all_gather(flat, own, bounds)

    def reduce_scatter(self, output: Tensor, flat: Tensor, place: WindowTensor | None, op: str) -> None:
        """Reduce a flat tensor over the group; rank r of the group gets block r in its flat ``output``."""
        numel, half = output.numel(), output.dtype in HALF_TYPES and not op.startswith(TREE)
        with inference_mode():
            # Row n: this node's part of the result of this slice's rank on node n.
            totals = output.new_empty((len(self._table), numel), dtype=float32 if half else None)
            for total, ranks in zip(totals, self._table, strict=True):
                self._reduce(total, flat, [slice(rank * numel, (rank + 1) * numel) for rank in ranks], place, op)
            result = totals.new_empty(numel) if half else output
            self._across.reduce_scatter(result, totals, _step(op).removeprefix(TREE))
            if op.endswith("avg"):
                result /= self._size
            if half:
                output.copy_(result)

    def _reduce(self, output: Tensor, flat: Tensor, rows: Sequence[slice], place: WindowTensor | None, op: str) -> None:
        """Reduce inside the node; its i-th rank reduces row i, into the flat ``output``."""
        if place is not None:
            row = rows[self._rank]
            self._window.reduce_scatter(output, place, row.start, row.stop, _step(op))
        elif self._bounce is not None:
            self._bounce.reduce_scatter(output, flat, rows, _step(op))


def _step(op: str) -> str:
    """Return the reduction of each level. For a mean both levels sum, and the sum is divided once at the end."""
    return op.replace("avg", "sum")
