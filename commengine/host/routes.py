"""Which way a large collective of host tensors goes: by MPI, through a node's memory, or in two levels.

Inside a node tensors in windows are reduced where they lie (`commengine.shared_memory.window_collectives`), private
ones through slots (`commengine.shared_memory.slots`); in a group that spans nodes a reduction has two levels
(`commengine.shared_memory.two_level`). From how many bytes on, a table says (`commengine.host.switch_points`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from commengine.shared_memory.flags import PRIVATE, Lane, fits
from commengine.shared_memory.slots import Bounce
from commengine.shared_memory.two_level import TwoLevel
from commengine.shared_memory.window_collectives import InWindow
from commengine.shared_memory.windows import Place, SharedTensors

from .switch_points import NEVER, REDUCING, Point, SwitchPoints

if TYPE_CHECKING:
    from mpi4py import MPI

    from .transport import HostTransport


class _Way(NamedTuple):
    """Through memory. place: of the tensor in a window; bounce: where it is private; two_level: in both cases."""

    window: InWindow
    place: Place | None
    bounce: Bounce | None
    two_level: TwoLevel | None


class MemoryPaths:
    """The ways beside MPI of one lane: the caller's, or a stream's.

    comm: the lane's own MPI communicator. wait: how to wait until a function says so. transport: makes what carries
    slices between nodes. deterministic: no two levels, whose sums are not in rank order.

    A method returns whether it has done the collective; where it has not, on all ranks alike, it is for MPI.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        shared: SharedTensors,
        points: SwitchPoints,
        *,
        wait: Callable[[Callable[[], bool]], None],
        transport: Callable[[MPI.Intracomm], HostTransport],
        deterministic: bool,
    ) -> None:
        self._comm, self._shared, self._points = comm, shared, points
        self._wait, self._transport, self._deterministic = wait, transport, deterministic
        self._found: dict[tuple[str, torch.dtype], Point] = {}
        self._least: dict[tuple[str, torch.dtype], float] = {}
        self._lane: Lane | None = None
        self._bounce: Bounce | None = None
        self._bounce_made = False
        self._two_level: TwoLevel | None = None
        self._levels: list[Any] = []  # where nodes are several: this node's ranks, and those of this slice

    def open(self) -> None:
        """Be ready for every tensor. Collective, on the ranks' main threads, where a window may be made."""
        if self._shared.node is None:
            return
        self._open_lane()
        if self._points.private_too(self._shared.node.size, spanning=not self._shared.node.alone):
            self._open_bounce()

    def close(self) -> None:
        """Free what was made. Collective."""
        if self._bounce is not None:
            self._bounce.close()
        if self._lane is not None:
            self._lane.close()
        for comm in self._levels:
            comm.Free()

    def all_reduce(self, tensor: Tensor, op: str) -> bool:
        """See `HostTransport.all_reduce`."""
        way = self._way("all_reduce", tensor.nbytes, tensor)
        if way is None:
            return False
        flat = tensor.data.view(-1)  # .data: writing there is no change that autograd has to know of
        rows = self._rows(flat)
        if way.two_level is not None:
            way.two_level.all_reduce(flat, rows, way.place, op)
        elif way.place is not None:
            way.window.all_reduce(way.place, rows[self._rank], op)
        elif way.bounce is not None:
            way.bounce.all_reduce(flat, rows, op)
        return True

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> bool:
        """See `HostTransport.reduce_scatter`."""
        way = self._way("reduce_scatter", input.nbytes, input)
        if way is None:
            return False
        flat, result = input.data.view(-1), output.data.view(-1)
        rows = self._rows(flat)
        if way.two_level is not None:
            way.two_level.reduce_scatter(result, flat, way.place, op)
        elif way.place is not None:
            way.window.reduce_scatter(result, way.place, rows[self._rank], op)
        elif way.bounce is not None:
            way.bounce.reduce_scatter(result, [flat[row] for row in rows], op)
        return True

    def all_gather(self, output: Tensor, input: Tensor) -> bool:
        """See `HostTransport.all_gather`."""
        nbytes = output.nbytes
        way = self._way("all_gather", nbytes, output, input)
        if way is None or way.place is None:
            return False
        if way.place.nbytes == nbytes:
            way.window.gather_into(way.place, self._rows(output)[self._rank], input)
        else:
            way.window.all_gather(output, way.place)
        return True

    def broadcast(self, tensor: Tensor, root: int) -> bool:
        """See `HostTransport.broadcast`."""
        way = self._way("broadcast", tensor.nbytes, tensor)
        if way is None or way.place is None:
            return False
        way.window.broadcast(way.place, root)
        return True

    @property
    def _rank(self) -> int:
        """In the node."""
        return 0 if self._lane is None else self._lane.rank

    def _rows(self, tensor: Tensor) -> list[slice]:
        """A flat tensor in as many parts as the node has ranks."""
        size, numel = 1 if self._lane is None else self._lane.size, tensor.numel()
        bounds = [numel * rank // size for rank in range(size + 1)]
        return [slice(low, high) for low, high in itertools.pairwise(bounds)]

    def _way(self, operation: str, nbytes: int, *tensors: Tensor) -> _Way | None:
        """The way of a collective of ``nbytes``, given by the first of ``tensors`` that lies in a window, or None.

        Collective the first time that it is not None.
        """
        dtype = tensors[0].dtype
        least = self._least.get((operation, dtype))
        if least is None:
            # At least 1: nothing of an empty tensor keeps the ranks in step, and MPI has nothing to do for it either.
            least = self._least[operation, dtype] = max(1, self._least_bytes(operation, dtype))
        if nbytes < least:  # first: what goes by MPI is not to be slowed down
            return None
        node, point = self._shared.node, self._found[operation, dtype]
        assert node is not None  # else there is no least
        place = None
        if self._shared.segments:
            place = next(filter(None, map(self._shared.find, tensors)), None)
        taken = not node.alone or nbytes >= (point.bounce if place is None else point.window)
        taken = taken and (place is not None or operation in REDUCING)
        if self._shared.segments and not (taken and (place is not None or self._bounce is not None)):
            # Where this rank goes to MPI another one, whose tensor does not lie as this one does, would wait in memory.
            self._open_lane()
            assert self._lane is not None
            self._lane.check(operation, PRIVATE if place is None else place.number, nbytes, str(dtype))
        if not taken:
            return None
        window = self._open_lane()
        bounce = None
        if place is None and (bounce := self._open_bounce()) is None:
            return None
        return _Way(window, place, bounce, self._two_level)

    def _least_bytes(self, operation: str, dtype: torch.dtype) -> float:
        """From how many bytes on there is a way for some tensor. Collective the first time."""
        node = self._shared.node
        if node is None:
            return NEVER
        point = self._found[operation, dtype] = self._points.point(operation, dtype, node.size)
        if node.alone:
            return min(point.window, point.bounce)
        return NEVER if operation not in REDUCING or self._deterministic else point.two_level

    def _open_lane(self) -> InWindow:
        """Flags, and what is between the nodes. Collective the first time."""
        node = self._shared.node
        assert node is not None
        if self._lane is None:
            local: Any = self._comm
            if not node.alone:
                local = self._comm.Split(node.index, self._comm.rank)
                self._levels = [local, self._comm.Split(local.rank, node.index)]
            self._lane = Lane(local, self._wait)
            self._window = InWindow(self._lane)
            if not node.alone:
                across = self._transport(self._levels[1])
                self._two_level = TwoLevel(self._window, self._open_bounce(), across, node.table, local.rank)
        return self._window

    def _open_bounce(self) -> Bounce | None:
        """Slots, or None on all ranks where a node has no memory for them. Collective the first time."""
        if not self._bounce_made and self._lane is not None:
            self._bounce_made = True
            if fits(self._comm, Bounce.nbytes() * self._lane.size):
                self._bounce = Bounce(self._lane)
        return self._bounce
