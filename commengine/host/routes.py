"""The route of a large collective of host tensors: MPI, the shared memory of one node, or two levels.

| route      | used for                                       | implementation                                |
|------------|------------------------------------------------|-----------------------------------------------|
| window     | tensors that lie in windows, inside one node   | `commengine.shared_memory.window_collectives` |
| bounce     | reductions of private tensors, inside one node | `commengine.shared_memory.slots`              |
| two levels | reductions of a group that spans nodes         | `commengine.shared_memory.two_level`          |
| MPI        | everything else                                | `commengine.host.transport`                   |

A table of switch points (`commengine.host.switch_points`) says from which size on each route is faster than MPI.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from commengine.mpi import making_communicators
from commengine.operations import REDUCING_IN_MEMORY
from commengine.shared_memory.flags import PRIVATE, Flags, fits
from commengine.shared_memory.nodes import Node
from commengine.shared_memory.slots import Bounce
from commengine.shared_memory.two_level import AcrossNodes, TwoLevel
from commengine.shared_memory.window_collectives import InWindow, PrivateElsewhereError
from commengine.shared_memory.windows import SharedTensors, WindowTensor

from .switch_points import NEVER, Point, SwitchPoints

if TYPE_CHECKING:
    from mpi4py import MPI


class _Route(NamedTuple):
    """A route through memory.

    place: the tensor's place in a window; None: the tensor is private, and ``bounce`` takes it.
    two_level: in a group that spans nodes, the reduction that uses ``window`` or ``bounce`` inside each node.
    """

    window: InWindow
    place: WindowTensor | None
    bounce: Bounce | None
    two_level: TwoLevel | None


class MemoryRoutes:
    """The routes through memory for one sequence of collectives: the caller's own, or that of one stream.

    comm: the MPI communicator of the sequence, which nothing else uses.
    wait: waits until a function returns True.
    transport: makes the transport that moves slices between nodes, over a communicator of one rank of each node.
    deterministic: never two levels, whose sums are not in rank order.

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
        deterministic: bool,
    ) -> None:
        self._comm, self._shared, self._points = comm, shared, points
        self._wait, self._transport, self._deterministic = wait, transport, deterministic
        self._point: dict[tuple[str, torch.dtype], Point] = {}
        self._least: dict[tuple[str, torch.dtype], float] = {}
        self._flags: Flags | None = None
        self._bounce: Bounce | None = None
        self._bounce_tried = False
        self._two_level: TwoLevel | None = None
        self._levels: list[Any] = []  # in a group of several nodes: this node's ranks, and the ranks of this slice

    def open(self) -> None:
        """Make all windows now. Collective; every rank calls it on its main thread, where a window may be made."""
        if self._shared.node is None:
            return
        self._open_flags()
        if self._points.private_too(self._shared.node.size, spanning=not self._shared.node.alone):
            self._open_bounce()

    def close(self) -> None:
        """Free what was made. Collective."""
        if self._bounce is not None:
            self._bounce.close()
        if self._flags is not None:
            self._flags.close()
        for comm in self._levels:
            comm.Free()

    # The collectives --------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str) -> bool:
        """See `HostTransport.all_reduce`."""
        route = self._route("all_reduce", op, tensor.nbytes, tensor)
        if route is None:
            return False
        flat = tensor.data.view(-1)  # .data: autograd must not see the write
        rows = self._rows(flat)
        bounce = route.bounce
        if route.two_level is not None:
            route.two_level.all_reduce(flat, rows, route.place, op)
            return True
        if route.place is not None:
            try:
                route.window.all_reduce(route.place, rows[self._rank], op)
                return True
            except PrivateElsewhereError:
                bounce = self._as_private("all_reduce", tensor.nbytes, tensor.dtype)
        if bounce is None:
            return False
        bounce.all_reduce(flat, rows, op)
        return True

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> bool:
        """See `HostTransport.reduce_scatter`."""
        route = self._route("reduce_scatter", op, input.nbytes, input)
        if route is None:
            return False
        flat, result = input.data.view(-1), output.data.view(-1)
        rows = self._rows(flat)
        bounce = route.bounce
        if route.two_level is not None:
            route.two_level.reduce_scatter(result, flat, route.place, op)
            return True
        if route.place is not None:
            try:
                route.window.reduce_scatter(result, route.place, rows[self._rank], op)
                return True
            except PrivateElsewhereError:
                bounce = self._as_private("reduce_scatter", input.nbytes, input.dtype)
        if bounce is None:
            return False
        bounce.reduce_scatter(result, [flat[row] for row in rows], op)
        return True

    def all_gather(self, output: Tensor, input: Tensor) -> bool:
        """See `HostTransport.all_gather`."""
        nbytes = output.nbytes
        route = self._route("all_gather", "", nbytes, output, input)
        if route is None or route.place is None:
            return False
        try:
            if route.place.nbytes == nbytes:
                route.window.gather_into(route.place, self._rows(output)[self._rank], input)
            else:
                route.window.all_gather(output, route.place)
        except PrivateElsewhereError:
            return self._as_private("all_gather", nbytes, output.dtype) is not None
        return True

    def broadcast(self, tensor: Tensor, root: int) -> bool:
        """See `HostTransport.broadcast`."""
        route = self._route("broadcast", f"{root}", tensor.nbytes, tensor)
        if route is None or route.place is None:
            return False
        try:
            route.window.broadcast(route.place, root)
        except PrivateElsewhereError:
            return self._as_private("broadcast", tensor.nbytes, tensor.dtype) is not None
        return True

    @property
    def _rank(self) -> int:
        """This rank's number in its node."""
        return 0 if self._flags is None else self._flags.rank

    def _rows(self, tensor: Tensor) -> list[slice]:
        """Cut a flat tensor into as many parts as the node has ranks."""
        size, numel = 1 if self._flags is None else self._flags.size, tensor.numel()
        bounds = [numel * rank // size for rank in range(size + 1)]
        return [slice(low, high) for low, high in itertools.pairwise(bounds)]

    # Choosing a route -------------------------------------------------------------------------------------------

    def _route(self, operation: str, how: str, nbytes: int, *tensors: Tensor) -> _Route | None:
        """Return the route of a collective of ``nbytes``, or None for MPI.

        how: the reduction or the root. tensors: the tensors that may lie in a window; the first one that does is used
        in place.
        Collective for a collective that may go through memory, because the first one makes the flags and slots.
        """
        dtype = tensors[0].dtype
        least = self._least.get((operation, dtype))
        if least is None:
            least = self._look_up(operation, dtype)
        if nbytes < least:  # tested first: collectives that go by MPI must not become slower
            return None
        place = self._find(tensors)
        chosen = self._pays(operation, nbytes, dtype, place)
        compared_there = chosen and (place is not None or self._bounce is not None)
        if self._shared.segments and not compared_there:
            self._compare(operation, how, nbytes, dtype, place)
        if not chosen:
            return None
        window = self._open_flags()
        bounce = self._open_bounce() if place is None else None
        if place is None and bounce is None:
            return None
        return _Route(window, place, bounce, self._two_level)

    def _look_up(self, operation: str, dtype: torch.dtype) -> float:
        """Return the size in bytes from which on some route may pay. Collective the first time."""
        node = self._shared.node
        least = NEVER
        if node is not None:
            point = self._point[operation, dtype] = self._points.point(operation, dtype, node.size)
            if node.alone:
                least = min(point.window, point.bounce)
            elif operation in REDUCING_IN_MEMORY and not self._deterministic:
                least = point.two_level
        # At least 1 byte: an empty tensor has nothing that keeps the ranks in step, and MPI has nothing to do either.
        self._least[operation, dtype] = max(1, least)
        return self._least[operation, dtype]

    def _find(self, tensors: tuple[Tensor, ...]) -> WindowTensor | None:
        """Return the place of the first tensor that lies in a window. Of a pool's blocks only the first tensor counts.

        Ranks may differ in which tensors are blocks; they would compare places of different tensors.
        """
        if not self._shared.segments:
            return None
        places = map(self._shared.find, tensors)
        return next((place for n, place in enumerate(places) if place and not (n and place.block)), None)

    def _pays(self, operation: str, nbytes: int, dtype: torch.dtype, place: WindowTensor | None) -> bool:
        """Whether a tensor of this size goes through memory: in place, or, for a private tensor, through slots."""
        if place is None and operation not in REDUCING_IN_MEMORY:
            return False
        point = self._point[operation, dtype]
        return not self._node.alone or nbytes >= (point.bounce if place is None else point.window)

    def _compare(self, operation: str, how: str, nbytes: int, dtype: torch.dtype, place: WindowTensor | None) -> None:
        """Compare the call with those of the node's other ranks; raise CollectiveMismatch if they differ.

        A rank whose tensor lies elsewhere may choose another route. It would wait in memory for a rank that waits in
        MPI. Routes that are ready compare the calls themselves when they begin.
        """
        self._open_flags()
        assert self._flags is not None
        self._flags.check(operation, PRIVATE if place is None else place.number, nbytes, f"{dtype} {how}")

    def _as_private(self, operation: str, nbytes: int, dtype: torch.dtype) -> Bounce | None:
        """Go on as the ranks do whose tensors are private. Returns their slots; None if they use MPI.

        This rank has a block of a pool, and has begun the collective; another rank has none, because its pool is full.
        That rank has compared the calls in the slots if they exist, and else before it looks for another way.
        """
        assert self._flags is not None
        pays = self._pays(operation, nbytes, dtype, None)
        if pays and self._bounce is not None:
            self._flags.begin_private()
            return self._bounce
        self._flags.meet()
        return self._open_bounce() if pays else None

    # Setting up -------------------------------------------------------------------------------------------------

    @property
    def _node(self) -> Node:
        node = self._shared.node
        assert node is not None  # otherwise `_look_up` has found that no route ever pays
        return node

    def _open_flags(self) -> InWindow:
        """Return the collectives in windows. The first call makes the flags and the second level, and is collective."""
        if self._flags is None:
            node = self._node
            local: Any = self._comm
            if not node.alone:
                with making_communicators():
                    local = self._comm.Split(node.index, self._comm.rank)
                    self._levels = [local, self._comm.Split(local.rank, node.index)]
            self._flags = Flags(local, self._wait)
            self._window = InWindow(self._flags)
            if not node.alone:
                across = self._transport(self._levels[1])
                self._two_level = TwoLevel(self._window, self._open_bounce(), across, node.table, local.rank)
        return self._window

    def _open_bounce(self) -> Bounce | None:
        """Return the slots, or None on all ranks if some node has no memory for them. Collective the first time."""
        if not self._bounce_tried and self._flags is not None:
            self._bounce_tried = True
            if fits(self._comm, Bounce.nbytes() * self._flags.size):
                self._bounce = Bounce(self._flags)
        return self._bounce
