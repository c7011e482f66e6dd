"""The memory of a node for one sequence of collectives: its flags, its slots, and its way to the other nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commengine.mpi import making_communicators

from .flags import Flags
from .nodes import Node
from .slots import SLOT_BYTES, SLOTS, Slots
from .windows import SharedTensors, WindowTensor

if TYPE_CHECKING:
    from mpi4py import MPI


class SequenceMemory:
    """What the ranks of a node share for one sequence of collectives: the caller's own, or that of one stream.

    flags: by which they meet and compare their calls. slots: for private tensors; None if they are not asked for, or a
    node has no memory for them. peers: the private memory of the node's ranks; None where it cannot be read, and in a
    group of several nodes. rank, size: this rank's number in its node, and the number of the node's ranks. node: all
    nodes of the group. windows: those of the group. across: in a group of several nodes, what runs operations between
    the ranks of this number on all nodes.
    """

    def __init__(self, flags: Flags, slots: Slots | None, windows: SharedTensors, node: Node) -> None:
        self.flags, self.slots, self.windows, self.node = flags, slots, windows, node
        self.rank, self.size = flags.rank, flags.size
        self.peers = windows.peers if node.alone and slots is not None else None
        self.across: Any = None
        self._comm: Any = None

    @classmethod
    def make(
        cls,
        comm: MPI.Intracomm,
        shared: SharedTensors,
        *,
        slots: bool,
        wait: Callable[[Callable[[], bool]], None],
        over: Callable[[MPI.Intracomm], Any],
    ) -> SequenceMemory | None:
        """Return the memory of the sequence of ``comm``; None, on all ranks, if a node has none. Collective.

        slots: whether to make them. wait: waits until a function returns True. over: makes what runs operations on an
        MPI communicator of a part of the group.
        """
        node = shared.node
        segment = None if node is None else shared.share(Flags.bytes_of(comm.size))
        if node is None or segment is None:
            return None
        flags = Flags(
            segment,
            node.comm.rank,
            progress=comm.Iprobe,
            wait=wait,
            group=shared,
            ranks=node.table[node.index],
        )
        kept = shared.share(SLOTS * SLOT_BYTES) if slots else None
        made = cls(flags, None if kept is None else Slots(flags, kept), shared, node)
        if not node.alone:
            with making_communicators():
                made._comm = comm.Split(flags.rank, node.index)
            made.across = over(made._comm)
        return made

    def row(self, numel: int) -> tuple[int, int]:
        """Return the bounds of this rank's row when a flat tensor is cut into as many as the node has ranks."""
        return numel * self.rank // self.size, numel * (self.rank + 1) // self.size

    def rows(self, numel: int) -> list[slice]:
        """Return all rows of such a tensor."""
        size = self.size
        return [slice(numel * rank // size, numel * (rank + 1) // size) for rank in range(size)]

    def begin(self, operation: str, place: WindowTensor, how: object = "") -> None:
        """Wait for all ranks, and compare the calls, because a collective touches their memory.

        They wait for each other at its end, too: the caller then calls ``flags.meet()``. A rank that raises meanwhile
        does not come there, and the others are told (`Flags.stop`).
        """
        self.flags.begin(operation, place.number, place.nbytes, (place.dtype, how))

    def close(self) -> None:
        """Free the communicator between nodes. Collective."""
        if self._comm is not None:
            self._comm.Free()
            self._comm = None
