"""Operands: where a tensor that a program makes for a collective should lie."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from commengine.errors import CollectiveError
from commengine.shared_memory.windows import SharedTensors

from .switch_points import NEVER, SwitchPoints

#: the most bytes of a node's shared memory that the operands of a rank take, unless a program says another number
POOL_BYTES = 1 << 30


class Operands:
    """The tensors that a program makes for one communicator's collectives, in shared memory where that is faster.

    shared, points: the communicator's. limit: the most bytes of shared memory for this rank's tensors. ``limit``, too,
    is the same on all ranks.
    """

    def __init__(self, shared: SharedTensors, points: SwitchPoints, limit: int) -> None:
        self._shared, self._points, self.limit = shared, points, limit
        #: the size in bytes below which no tensor of any operation or dtype should lie in shared memory
        self.floor = max(1, min((point.window for point in points.rows.values()), default=NEVER))
        #: what `look_up` has found
        self.known: dict[tuple[str, torch.dtype], float] = {}

    def look_up(self, operation: str, dtype: torch.dtype) -> float:
        """The bytes from which on a tensor should lie in shared memory; NEVER if no tensor should. Collective.

        The size is that of the whole tensor, as in the table of switch points. It is NEVER in a group that spans nodes.
        """
        node = self._shared.node if self.limit > 0 else None
        least = NEVER
        if node is not None and node.alone:
            least = max(1, self._points.point(operation, dtype, node.size).window)
        self.known[operation, dtype] = least
        return least

    def open(self) -> None:
        """Make the pool, if there is none. Collective; nothing may be in flight on the group's streams."""
        if self._shared.pool is None:
            self._shared.open_pool(self.limit)
            if self._shared.pool is None:
                self.known = dict.fromkeys(self.known, NEVER)
                self.limit = 0

    @property
    def opened(self) -> bool:
        """Whether `open` has been called, with or without success."""
        return self._shared.pool is not None or self.limit == 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in the pool, or a private one if there is no room. Not collective."""
        taken = None if self._shared.pool is None else self._shared.pool.take(math.prod(shape), dtype)
        # Not a view: autograd would refuse to change one in place that a Function has returned.
        return torch.empty(shape, dtype=dtype, device="cpu") if taken is None else taken.resize_(shape)


def checked_limit(limit: Any) -> int:
    """Return ``limit``, a rank's ``operand_bytes``. Raises CollectiveError if it is not a number of bytes."""
    try:
        number = operator.index(limit)
    except TypeError:
        number = -1
    if number < 0:
        raise CollectiveError(f"operand_bytes={limit!r} must be a number of bytes, 0 or more")
    return number
