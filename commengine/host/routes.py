"""The route of a large collective of host tensors: MPI, the shared memory of one node, or two levels.

| route      | used for                                       | implementation                                |
|------------|------------------------------------------------|-----------------------------------------------|
| window     | tensors that lie in windows, inside one node   | `commengine.shared_memory.window_collectives` |
| bounce     | private tensors, inside one node               | `commengine.shared_memory.slots`              |
| two levels | reductions of a group that spans nodes         | `commengine.shared_memory.two_level`          |
| MPI        | everything else                                | `commengine.host.transport`                   |

A table of switch points (`commengine.host.switch_points`) says from which size on each route is faster than MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commengine.dtypes import TREE, Order
from commengine.mpi import making_communicators
from commengine.operations import REDUCING_IN_MEMORY
from commengine.shared_memory.flags import LINES_BYTES, PRIVATE, Flags
from commengine.shared_memory.nodes import Node
from commengine.shared_memory.slots import Bounce
from commengine.shared_memory.two_level import AcrossNodes, TwoLevel
from commengine.shared_memory.window_collectives import InWindow, PrivateElsewhereError
from commengine.shared_memory.windows import SharedTensors, WindowTensor

from .switch_points import NEVER, Point, SwitchPoints

if TYPE_CHECKING:
    from mpi4py import MPI


#: the place of a tensor that lies in no window and goes through slots
_PRIVATE = object()


class MemoryRoutes:
    """The routes through memory for one sequence of collectives: the caller's own, or that of one stream.

    comm: the MPI communicator of the sequence, which nothing else uses.
    wait: waits until a function returns True.
    transport: makes the transport that moves slices between nodes, over a communicator of one rank of each node.
    order: with "rank" never two levels, whose sums are not in rank order. With "tree" two levels only if the ranks of
        each node are a subtree: 2^k neighbours.

    Each operation returns whether it has done the collective. False, on all ranks alike, leaves it to MPI.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        shared: SharedTensors,
        points: SwitchPoints,
        *,
        wait: Callable[[Callable[[], bool]], None],
        transport: Callable[[MPI.Intracomm], AcrossNodes],
        order: Order | None,
    ) -> None:
        self._comm, self._shared, self._points = comm, shared, points
        self._wait, self._transport, self._order = wait, transport, order
        self._prefix = TREE if order == "tree" else ""
        self._point: dict[tuple[str, torch.dtype], tuple[float, Point]] = {}  # from which size on a route may pay
        self._flags: Flags | None = None
        self._window: Any = None  # the collectives in windows, made with the flags
        self._bounce: Any = None  # the slots, if there are any
        self._rank, self._size = 0, 1  # of this rank in its node, once there are flags
        self._flags_tried = self._bounce_tried = False
        self._two_level: TwoLevel | None = None
        self._across: Any = None  # in a group of several nodes: the ranks of this slice

    def open(self) -> None:
        """Make flags and slots now. Collective; every rank calls it on its main thread."""
        if self._shared.node is None or not self._open_flags():
            return
        if self._points.private_too(self._shared.node.size, spanning=not self._shared.node.alone):
            self._open_bounce()

    def close(self) -> None:
        """Free what was made. Collective."""
        self._flags = self._window = self._bounce = self._two_level = None
        if self._across is not None:
            self._across.Free()
            self._across = None

    # The collectives --------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str) -> bool:
        """See `HostTransport.all_reduce`."""
        op = self._prefix + op
        place, begun = self._choose("all_reduce", tensor.nbytes, op, tensor), False
        if self._two_level is not None and place is not None:
            flat = _flat(tensor)
            where = None if place is _PRIVATE else place
            self._two_level.all_reduce(flat, self._rows(flat.numel()), where, op)
            return True
        if place is not None and place is not _PRIVATE:
            try:
                self._window.all_reduce(place, *self._row(tensor.numel()), op)
                return True
            except PrivateElsewhereError:
                place, begun = self._as_private("all_reduce", tensor)
        if place is None:
            return False
        flat = _flat(tensor)
        self._bounce.all_reduce(flat, () if self._size == 2 else self._rows(flat.numel()), op, begun=begun)
        return True

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> bool:
        """See `HostTransport.reduce_scatter`."""
        op = self._prefix + op
        place, begun = self._choose("reduce_scatter", input.nbytes, op, input), False
        if self._two_level is not None and place is not None:
            where = None if place is _PRIVATE else place
            self._two_level.reduce_scatter(_flat(output), _flat(input), where, op)
            return True
        if place is not None and place is not _PRIVATE:
            try:
                self._window.reduce_scatter(output, place, *self._row(input.numel()), op)
                return True
            except PrivateElsewhereError:
                place, begun = self._as_private("reduce_scatter", input)
        if place is None:
            return False
        self._bounce.reduce_scatter(_flat(output), _flat(input), self._rows(input.numel()), op, begun=begun)
        return True

    def all_gather(self, output: Tensor, input: Tensor) -> bool:
        """See `HostTransport.all_gather`."""
        nbytes = output.nbytes
        place, begun = self._choose("all_gather", nbytes, "", output, input), False
        if place is not None and place is not _PRIVATE:
            try:
                if place.nbytes == nbytes:
                    self._window.gather_into(place, *self._row(output.numel()), input)
                else:
                    self._window.all_gather(output, place)
                return True
            except PrivateElsewhereError:
                place, begun = self._as_private("all_gather", output)
        if place is None:
            return False
        self._bounce.all_gather(output, input, range(0, nbytes + 1, nbytes // self._size), begun=begun)
        return True

    def broadcast(self, tensor: Tensor, root: int) -> bool:
        """See `HostTransport.broadcast`."""
        place, begun = self._choose("broadcast", tensor.nbytes, root, tensor), False
        if place is not None and place is not _PRIVATE:
            try:
                self._window.broadcast(place, root)
                return True
            except PrivateElsewhereError:
                place, begun = self._as_private("broadcast", tensor)
        if place is None:
            return False
        self._bounce.broadcast(tensor, root, begun=begun)
        return True

    def compare_private(self, operation: str, nbytes: int, how: object, tensor: Tensor, other: Tensor) -> bool:
        """Compare a collective of private tensors that goes by MPI because it is too small for slots.

        Returns whether that is so; otherwise nothing was compared, and the operation's own method finds the way.
        Reductions in an order of ours never go by MPI. how: as in `_choose`. other: the second tensor, or the first.
        """
        dtype = tensor.dtype
        found, find = self._point.get((operation, dtype)), self._shared.find
        if found is None or self._flags is None or nbytes >= found[1].bounce or not self._node.alone:
            return False
        if find(tensor) is not None or (other is not tensor and find(other) is not None):
            return False
        if nbytes >= found[0]:
            self._flags.begin(operation, PRIVATE, nbytes, (dtype, how))
        return True

    def _row(self, numel: int) -> tuple[int, int]:
        """Return the bounds of this rank's row when a flat tensor is cut into as many as the node has ranks."""
        return numel * self._rank // self._size, numel * (self._rank + 1) // self._size

    def _rows(self, numel: int) -> list[slice]:
        """Return the bounds of all rows."""
        size = self._size
        return [slice(numel * rank // size, numel * (rank + 1) // size) for rank in range(size)]

    # Choosing a route -------------------------------------------------------------------------------------------

    def _choose(self, operation: str, nbytes: int, how: object, *tensors: Tensor) -> Any:
        """Return the place of a collective of ``nbytes`` in a window, _PRIVATE for slots, or None for MPI.

        how: the reduction or the root. tensors: those that may lie in a window; the first that does is used in place.
        Collective for a collective that may go through memory, because the first one makes the flags and slots.
        """
        dtype = tensors[0].dtype
        found = self._point.get((operation, dtype))
        least, point = self._look_up(operation, dtype) if found is None else found
        if nbytes < least:  # tested first: collectives that go by MPI must not become slower
            return None
        windows = self._shared.segments
        place: Any = self._find(tensors) if windows else None
        if place is not None and place.block and nbytes < point.window:
            place = None  # another rank's tensor may be private, and goes through slots from another size on
        private = place is None
        # Between nodes the row has one size only, for two levels.
        chosen = not self._node.alone or nbytes >= (point.bounce if private else point.window)
        if chosen and (self._bounce if private else self._window) is not None:
            return _PRIVATE if private else place  # the calls are compared when they begin
        if (windows or chosen) and not self._open_flags():
            return None
        if windows:
            places = self._compare(operation, nbytes, (dtype, how), place)
            if places is not None and PRIVATE in places and not private:
                private, chosen = True, nbytes >= point.bounce
        if not chosen:
            return None
        if private and self._open_bounce() is None:
            return None
        return _PRIVATE if private else place

    def _look_up(self, operation: str, dtype: torch.dtype) -> tuple[float, Point]:
        """Return the size in bytes from which on some route may pay, and the row. Collective the first time."""
        node = self._shared.node
        least, point = NEVER, Point()
        if node is not None:
            point = self._points.point(operation, dtype, node.size)
            if node.alone:
                least = min(point.window, point.bounce)
            elif operation in REDUCING_IN_MEMORY and self._two_levels_keep_the_order(node):
                least = point.two_level
        # At least 1 byte: an empty tensor has nothing that keeps the ranks in step, and MPI has nothing to do either.
        self._point[operation, dtype] = max(1, least), point
        return self._point[operation, dtype]

    def _two_levels_keep_the_order(self, node: Node) -> bool:
        if self._order is None:
            return True
        in_order = [rank for ranks in node.table for rank in ranks] == list(range(self._comm.size))
        return self._order == "tree" and in_order and node.size.bit_count() == 1

    def _find(self, tensors: tuple[Tensor, ...]) -> WindowTensor | None:
        """Return the place of the first tensor that lies in a window, or else that of the first tensor in a pool.

        The ranks may differ in which tensors are blocks of a pool, and must compare the same tensor. A block therefore
        counts only if no tensor lies in another window, and only if it is the first tensor.
        """
        found = self._shared.find(tensors[0])
        if found is None or found.block:
            for tensor in tensors[1:]:
                place = self._shared.find(tensor)
                if place is not None and not place.block:
                    return place
        return found

    def _compare(self, operation: str, nbytes: int, how: tuple[object, ...], place: WindowTensor | None) -> Any:
        """Compare the call with those of the node's other ranks; raise CollectiveMismatch if they differ.

        Returns the places of all ranks if they differ and may: blocks of a pool, and private tensors where it is full.

        A rank whose tensor lies elsewhere may choose another route. It would wait in memory for a rank that waits in
        MPI. Routes that are ready compare the calls themselves when they begin.
        """
        assert self._flags is not None
        return self._flags.begin(operation, PRIVATE if place is None else place.number, nbytes, how)

    def _as_private(self, operation: str, tensor: Tensor) -> tuple[Any, bool]:
        """Go on as a rank does whose tensor is private. Returns the place that `_choose` would give, and ``begun``.

        This rank has a block of a pool, and another rank has none, because its pool is full. The ranks have compared
        their calls. A rank that has slots did so there, and a rank that has none, before it makes them.
        """
        _, point = self._point[operation, tensor.dtype]
        if tensor.nbytes < point.bounce:
            return None, False
        if self._bounce is not None:
            return _PRIVATE, True
        return (None if self._open_bounce() is None else _PRIVATE), False

    # Setting up -------------------------------------------------------------------------------------------------

    @property
    def _node(self) -> Node:
        node = self._shared.node
        assert node is not None  # otherwise `_look_up` has found that no route ever pays
        return node

    def _open_flags(self) -> bool:
        """Make the flags and the second level, unless they are there; whether they are. Collective the first time."""
        if self._flags_tried:
            return self._flags is not None
        self._flags_tried = True
        node, shared = self._node, self._shared
        segment = shared.share(LINES_BYTES)
        if segment is None:
            return False
        self._rank, self._size = node.comm.rank, node.size
        self._flags = Flags(
            segment,
            self._rank,
            progress=self._comm.Iprobe,
            wait=self._wait,
            name=shared.name,
            size=self._comm.size,
            ranks=node.table[node.index],
        )
        self._window = InWindow(self._flags)
        if not node.alone:
            with making_communicators():
                self._across = self._comm.Split(self._rank, node.index)
            across = self._transport(self._across)
            self._two_level = TwoLevel(self._window, self._open_bounce(), across, node.table, self._rank)
        return True

    def _open_bounce(self) -> Bounce | None:
        """Return the slots, or None on all ranks if some node has no memory for them. Collective the first time."""
        if not self._bounce_tried and self._flags is not None:
            self._bounce_tried = True
            segment = self._shared.share(Bounce.nbytes())
            if segment is not None:
                self._bounce = Bounce(self._flags, segment)
        made: Bounce | None = self._bounce
        return made


def _flat(tensor: Tensor) -> Tensor:
    """Return the tensor as one row that autograd does not see."""
    tensor = tensor.data
    return tensor if tensor.dim() == 1 else tensor.view(-1)
