"""MPI for host tensors, as the operations use it: calls that take addresses, datatypes, pieces and waits.

Buffers are handed to mpi4py as addresses, which costs 0.25 us a buffer. A NumPy view costs 0.95 us, and DLPack 5.4 us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from commengine.dtypes import DTYPES, OUR_TYPES, TREE, MpiTypes
from commengine.mpi import load_mpi
from commengine.shared_memory.flags import spin

from .polling import PollingCalls

if TYPE_CHECKING:
    from mpi4py import MPI

#: The order in which the operands of a group are reduced: that of the ranks, one after the other, or a binary tree.
Order: TypeAlias = Literal["rank", "tree"]

ORDERS = get_args(Order)

#: up to this many bytes of the whole tensor, a dtype that is reduced in rank order is gathered into memory that is
#: kept. An all-reduce gathers everything there and reduces it on every rank: one round trip instead of two
SMALL_BYTES = 16 * 1024

#: a reduction of more than LONG_BYTES is cut into pieces. MPI's temporary copy of a longer tensor does not fit the
#: caches, and from 32 MB on malloc maps and clears it anew for every call (bench/results/overhead.md)
LONG_BYTES = 8 << 20
PIECE_BYTES = 4 << 20


class MpiWire:
    """One MPI communicator for the operations of one sequence of collectives; the caller owns it.

    comm: an MPI intracommunicator that nothing else communicates on.
    polling: give the core away while waiting (see `PollingCalls`).
    look: called now and then while waiting; implies ``polling``.
    order: reduce every dtype in rank order, or in a binary tree of the ranks (`Communicator`); None: as is fastest.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        polling: bool = False,
        look: Callable[[], None] | None = None,
        order: Order | None = None,
    ) -> None:
        mpi = load_mpi()
        self.comm, self.rank, self.size, self.order = comm, comm.rank, comm.size, order
        self.calls: Any = comm
        #: whether a wait gives the core away
        self.polls = polling or look is not None
        #: the persistent requests that were made, and those of them that nobody has any more
        self.prepared: dict[int, list[Any]] = {}
        self.retired: list[list[Any]] = []
        self.waitall: Callable[..., Any] = mpi.Request.Waitall
        self.testall: Callable[..., bool] = mpi.Request.Testall
        #: waits until a function returns True
        self.wait: Callable[[Callable[[], bool]], None] = spin
        if self.polls:
            polled = PollingCalls(comm, look)
            self.calls, self.waitall, self.wait = polled, polled.waitall, polled.wait
        self._how = {"polling": polling, "look": look, "order": order}
        #: the dtypes that torch reduces, in the order of `tree`, and not MPI
        self.in_order = OUR_TYPES if order is None else DTYPES
        self.tree = TREE if order == "tree" else ""
        self.types = MpiTypes(mpi)
        #: makes the memory that begins at an address into a buffer for MPI
        self.address: Callable[[int, int], Any] = mpi.memory.fromaddress
        self.status: Callable[[], MPI.Status] = mpi.Status
        self.in_place = mpi.IN_PLACE
        self._small: Tensor | None = None

    def over(self, comm: MPI.Intracomm) -> MpiWire:
        """Return a wire over another communicator, which waits and reduces as this one does."""
        return MpiWire(comm, **self._how)  # type: ignore[arg-type]

    def free_requests(self, *, all: bool) -> None:
        """Free the persistent requests that nobody has any more, or all; one that is under way stays."""
        for requests in list(self.prepared.values()) if all else [self.retired.pop() for _ in self.retired[:]]:
            self.prepared.pop(id(requests), None)
            while requests:
                requests.pop().Free()

    def stop(self, reason: str) -> None:
        """Let no wait of this wire go on, if it waits in a way that can end."""
        if isinstance(self.calls, PollingCalls):
            self.calls.stopped = reason

    def moved(self, tensor: Tensor) -> tuple[Any, MPI.Datatype]:
        """Return the tensor as a buffer of opaque elements of its width."""
        return self.address(tensor.data_ptr(), tensor.nbytes), self.types.move[tensor.dtype]

    def pieces(self, tensor: Tensor) -> Iterator[Any]:
        """Yield the tensor's memory in the pieces that MPI reduces one by one; one empty piece for an empty tensor."""
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        step = PIECE_BYTES if nbytes > LONG_BYTES else nbytes or 1
        for start in range(0, nbytes or 1, step):
            yield self.address(address + start, min(step, nbytes - start))

    def small(self, like: Tensor) -> Tensor:
        """Return memory for a small tensor of every rank, ``like`` this one; each call that uses it overwrites it."""
        with torch.inference_mode(False):  # a tensor of inference mode could not be used outside of it
            if self._small is None:
                self._small = torch.empty(self.size * SMALL_BYTES, dtype=torch.uint8, device="cpu")
            return self._small[: self.size * like.nbytes].view(like.dtype).view(self.size, *like.shape)


def divide(tensor: Tensor, divisor: int) -> None:
    """Divide ``tensor`` as MPI writes: to an address, which autograd and the thread's modes do not see."""
    with torch.inference_mode():
        tensor.div_(divisor)
