"""The MPI transport for host tensors: each operation of a Communicator, run to its end on the calling thread.

The transport checks no arguments, because `Communicator` has checked them. Buffers are handed to mpi4py as addresses,
which costs 0.25 us a buffer. A NumPy view costs 0.95 us, and DLPack 5.4 us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commengine.dtypes import (
    DTYPES,
    OUR_TYPES,
    TREE,
    MpiTypes,
    Order,
    reduce_in_order,
    reduce_unseen,
    unseen,
)  # fmt: skip
from commengine.errors import TransferError
from commengine.mpi import load_mpi
from commengine.operations import IN_MEMORY
from commengine.shared_memory.flags import spin
from commengine.shared_memory.windows import SharedTensors

from .polling import PollingCalls, WrappedCalls
from .routes import MemoryRoutes
from .small_buffers import Empty, GatheredSmall, SmallBuffers
from .switch_points import NEVER, SwitchPoints, kind_of

if TYPE_CHECKING:
    from mpi4py import MPI

#: up to this many bytes of the whole tensor, a dtype that is reduced in rank order is gathered into memory that is
#: kept. An all-reduce gathers everything there and reduces it on every rank: one round trip instead of two
SMALL_BYTES = 16 * 1024

#: a reduction of more than LONG_BYTES is cut into pieces. MPI's temporary copy of a longer tensor does not fit the
#: caches, and from 32 MB on malloc maps and clears it anew for every call (bench/results/overhead.md)
LONG_BYTES = 8 << 20
PIECE_BYTES = 4 << 20


class HostTransport:
    """Collectives on contiguous host tensors over one MPI communicator, which the caller owns.

    comm: an MPI intracommunicator that nothing else communicates on.
    polling: give the core away while waiting (see `PollingCalls`).
    look: called now and then while waiting; implies ``polling``.
    shared: the tensors in windows. With it, large collectives go through the memory of a node, from the sizes in
        ``points`` on (see `commengine.host.routes`). Without it, everything goes by MPI.
    order: reduce every dtype in rank order, or in a binary tree of the ranks (`Communicator`); None: as is fastest.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        polling: bool = False,
        look: Callable[[], None] | None = None,
        shared: SharedTensors | None = None,
        points: SwitchPoints | None = None,
        order: Order | None = None,
    ) -> None:
        mpi = load_mpi()
        self.rank = comm.rank
        self.size = comm.size
        self.order = order
        self._comm = comm
        self.calls: Any = comm
        self._waitall: Callable[..., Any] = mpi.Request.Waitall
        wait = spin
        if polling or look is not None:
            polled = PollingCalls(comm, look)
            self.calls, self._waitall, wait = polled, polled.waitall, polled.wait
        self.routes: Any = None
        self.windows: list[Any] = []  # of the group; they come and go
        #: the sizes in bytes from which on the routes are asked, by operation: for private tensors, and with windows
        self._private, self._any = dict.fromkeys(IN_MEMORY, NEVER), dict.fromkeys(IN_MEMORY, NEVER)
        self._points: SwitchPoints | None = None
        if shared is not None and comm.size > 1:
            points = SwitchPoints.load() if points is None else points
            self.windows, self._points = shared.segments, points
            self._private, self._any = points.leasts(windows=False), points.leasts(windows=True)
            self.routes = MemoryRoutes(
                comm,
                shared,
                points,
                wait=wait,
                transport=lambda across: HostTransport(across, polling=polling, look=look, order=order),
                order=order,
            )
        self.in_order = OUR_TYPES if order is None else DTYPES
        self._prefix = TREE if order == "tree" else ""
        self.types = MpiTypes(mpi)
        #: makes the memory that begins at an address into a buffer for MPI
        self.address = mpi.memory.fromaddress
        self._status = mpi.Status
        self.in_place = mpi.IN_PLACE
        self.small = SmallBuffers(self.size, self.types, _empty)

    def by_mpi(self, wrap: Callable[[Any], WrappedCalls], empty: Empty) -> HostTransport:
        """Return a transport over the same MPI communicator whose calls are wrapped and whose route is always MPI.

        wrap: gets the calls of this transport and returns the wrapped ones. empty: makes memory where the tensors lie,
        from a shape and a dtype. The result owns nothing.
        """
        made = HostTransport(self._comm, order=self.order)
        made.calls, made._waitall = wrap(self.calls), self._waitall
        made.small = SmallBuffers(self.size, self.types, empty)
        return made

    def leasts(self, operation: str, dtype: torch.dtype) -> tuple[float, float]:
        """The sizes in bytes from which on the routes are asked: for private tensors, and in a group with windows."""
        if self._points is None:
            return NEVER, NEVER
        kind = kind_of(operation, dtype)
        private, beside_windows = (self._points.least_of(operation, kind, windows=given) for given in (False, True))
        return private, beside_windows

    def _moved(self, tensor: Tensor) -> tuple[Any, MPI.Datatype]:
        """Return the tensor as a buffer of opaque elements of its width."""
        return self.address(tensor.data_ptr(), tensor.nbytes), self.types.move[tensor.dtype]

    def _memory(self, tensor: Tensor) -> memoryview:
        return memoryview(self._moved(tensor)[0])

    def open_routes(self) -> None:
        """Make flags and slots now; a worker thread would wait for the other ranks in calls that keep the core."""
        if self.routes is not None:
            self.routes.open()

    def close(self) -> None:
        """Free what the transport made; the communicator is the caller's. Collective."""
        if self.routes is not None:
            self.routes.close()

    # Reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        if tensor.dtype is torch.complex128 and _misaligned(tensor):
            self._in_copies(self.all_reduce, (tensor,), op)
            return
        nbytes = tensor.nbytes
        least = self._any if self.windows else self._private
        if nbytes >= least["all_reduce"] and self.routes.all_reduce(tensor, op):
            return
        dtype = tensor.dtype
        if dtype in self.in_order:
            self._all_reduce_in_order(tensor, op)
            return
        datatype, mpi_op = self.types.reduce[dtype, op]
        if nbytes <= LONG_BYTES:
            self.calls.Allreduce(self.in_place, (self.address(tensor.data_ptr(), nbytes), datatype), mpi_op)
        else:
            for piece in self._pieces(tensor):
                self.calls.Allreduce(self.in_place, (piece, datatype), mpi_op)
        if op == "avg":
            _divide(tensor, self.size)

    def _pieces(self, tensor: Tensor) -> Iterator[Any]:
        """Yield the tensor's memory in the pieces that MPI reduces one by one; one empty piece for an empty tensor."""
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        step = PIECE_BYTES if nbytes > LONG_BYTES else nbytes or 1
        for start in range(0, nbytes or 1, step):
            yield self.address(address + start, min(step, nbytes - start))

    def reduce(self, tensor: Tensor, root: int, op: str) -> None:
        if tensor.dtype is torch.complex128 and _misaligned(tensor):
            self._in_copies(self.reduce, (tensor,), root, op)
            return
        if tensor.dtype in self.in_order:
            chunk, counts, starts = self._reduce_chunks(tensor, op)
            buffer = self._moved(tensor)
            received = (buffer[0], counts, starts, buffer[1]) if self.rank == root else None
            self.calls.Gatherv(self._moved(chunk), received, root)
            return
        datatype, mpi_op = self.types.reduce[tensor.dtype, op]
        for piece in self._pieces(tensor):
            data = (piece, datatype)
            if self.rank == root:
                self.calls.Reduce(self.in_place, data, mpi_op, root)
            else:
                self.calls.Reduce(data, None, mpi_op, root)
        if op == "avg" and self.rank == root:
            _divide(tensor, self.size)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> None:
        nbytes, dtype = input.nbytes, input.dtype
        if dtype is torch.complex128 and _misaligned(output, input):
            self._in_copies(self.reduce_scatter, (output, input), op)
            return
        least = self._any if self.windows else self._private
        if nbytes >= least["reduce_scatter"] and self.routes.reduce_scatter(output, input, op):
            return
        if dtype in self.in_order and 0 < nbytes <= SMALL_BYTES:
            self.reduce_small(input, self.small[dtype, output.shape], op, output)
            return
        if dtype in self.in_order:
            parts = torch.empty_like(input)
            self.calls.Alltoall(self._moved(input), self._moved(parts))
            reduce_in_order(parts.view(self.size, *output.shape), self._prefix + op, output)
            return
        datatype, mpi_op = self.types.reduce[dtype, op]
        start, found, part, result = input.data_ptr(), output.data_ptr(), nbytes // self.size, output
        if part and found == start + self.rank * part:  # MPI's own form in place changes the other rows
            result = torch.empty_like(output)
            found = result.data_ptr()
        source, target = self.address(start, nbytes), self.address(found, part)
        self.calls.Reduce_scatter_block((source, datatype), (target, datatype), mpi_op)
        if op == "avg":
            _divide(result, self.size)
        if result is not output:
            with torch.inference_mode():  # as in `_divide`
                output.copy_(result)

    def _all_reduce_in_order(self, tensor: Tensor, op: str) -> None:
        if self.size == 1:
            return
        if tensor.nbytes <= SMALL_BYTES:
            self.reduce_small(tensor, self.small[tensor.dtype, tensor.shape], op, tensor)
            return
        chunk, counts, starts = self._reduce_chunks(tensor, op)
        buffer = self._moved(tensor)
        self.calls.Allgatherv(self._moved(chunk), (buffer[0], counts, starts, buffer[1]))

    def reduce_small(self, input: Tensor, buffers: GatheredSmall, op: str, output: Tensor) -> None:
        """Get from every rank what this rank reduces, and reduce it into ``output``.

        In an all-reduce ``output`` is ``input``; otherwise this is a reduce-scatter. buffers: for the dtype and shape
        of ``output``.
        """
        datatype, received, parts, pair = buffers
        collect = self.calls.Allgather if output is input else self.calls.Alltoall
        collect((self.address(input.data_ptr(), input.nbytes), datatype), received)
        written = output.data
        if pair and op == "sum" and not written.is_inference():
            torch.add(parts[0], parts[1], out=written)  # a short cut: the code below would end in this line
            return
        with unseen(written):
            reduce_unseen(parts, self._prefix + op, written)

    def _in_copies(self, method: Callable[..., None], tensors: tuple[Tensor, ...], *how: object) -> None:
        """Call ``method``, which writes into the first tensor, with copies of those that are misaligned.

        A tensor that is not keeps its place: the ranks compare places, and may differ in how tensors are aligned.
        """
        made = [torch.empty_like(one, device="cpu") if _misaligned(one) else one for one in tensors]
        copies = [
            (self._memory(copy), self._memory(one)) for copy, one in zip(made, tensors, strict=True) if copy is not one
        ]
        for copy, given in copies:
            copy[:] = given
        method(*made, *how)
        if made[0] is not tensors[0]:
            copy, given = copies[0]
            given[:] = copy

    def _reduce_chunks(self, tensor: Tensor, op: str) -> tuple[Tensor, list[int], list[int]]:
        """Let each rank reduce one chunk of the flat tensor. Returns this rank's chunk, all counts and all starts."""
        base, extra = divmod(tensor.numel(), self.size)
        counts = [base + (rank < extra) for rank in range(self.size)]
        starts = [sum(counts[:rank]) for rank in range(self.size)]
        mine = counts[self.rank]
        parts = tensor.new_empty((self.size, mine))
        sent, received = self._moved(tensor), self._moved(parts)
        places = [mine * rank for rank in range(self.size)]
        self.calls.Alltoallv((sent[0], counts, starts, sent[1]), (received[0], [mine] * self.size, places, received[1]))
        return reduce_in_order(parts, self._prefix + op, parts.new_empty(mine)), counts, starts

    # Movement -------------------------------------------------------------------------------------------------

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        if output.dtype is torch.complex128 and _misaligned(output, input):  # copied by torch, if one lies in a window
            self._in_copies(self.all_gather, (output, input))
            return
        nbytes = output.nbytes
        least = self._any if self.windows else self._private
        if nbytes >= least["all_gather"] and self.routes.all_gather(output, input):
            return
        datatype, source, target = self.types.move[output.dtype], input.data_ptr(), output.data_ptr()
        part = nbytes // self.size
        in_place = source == target + self.rank * part and part > 0
        sent = self.in_place if in_place else (self.address(source, part), datatype)
        self.calls.Allgather(sent, (self.address(target, nbytes), datatype))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        least = self._any if self.windows else self._private
        if tensor.nbytes >= least["broadcast"] and self.routes.broadcast(tensor, root):
            return
        self.calls.Bcast(self._moved(tensor), root)

    def gather(self, output: Tensor | None, input: Tensor, root: int) -> None:
        self.calls.Gather(self._moved(input), None if output is None else self._moved(output), root)

    def scatter(self, output: Tensor, input: Tensor | None, root: int) -> None:
        self.calls.Scatter(None if input is None else self._moved(input), self._moved(output), root)

    def all_to_all(self, output: Tensor, input: Tensor) -> None:
        self.calls.Alltoall(self._moved(input), self._moved(output))

    def barrier(self) -> None:
        self.calls.Barrier()

    # Point to point -------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int) -> None:
        self.calls.Send(self._moved(tensor), dst)

    def recv(self, tensor: Tensor, src: int) -> None:
        self.exchange([("recv", tensor, src)])

    def sendrecv(self, sent: Tensor, dst: int, received: Tensor, src: int) -> None:
        self.exchange([("send", sent, dst), ("recv", received, src)])

    def exchange(self, transfers: list[tuple[str, Tensor, int]]) -> None:
        """Start all sends and receives, ``(verb, tensor, peer)``, and wait for all. No order of them deadlocks.

        verb: "send" or "recv". Raises TransferError for a message of another length than its tensor.
        """
        requests, statuses = [], []
        for verb, tensor, peer in sorted(transfers, key=lambda transfer: transfer[0]):  # receives first
            start = self.calls.Irecv if verb == "recv" else self.calls.Isend
            requests.append(start(self._moved(tensor), peer))
            statuses.append(self._status())
        self._waitall(requests, statuses)
        received = [transfer for transfer in transfers if transfer[0] == "recv"]
        for (_, tensor, peer), status in zip(received, statuses, strict=False):
            count = status.Get_count(self.types.move[tensor.dtype])
            if count != tensor.numel():
                raise TransferError(
                    f"recv of {tensor.numel()} elements of {tensor.dtype} from rank {peer} got a message of {count}"
                )


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def _misaligned(*tensors: Tensor) -> bool:
    """Whether torch's arithmetic and copies of complex128 would end the process at the address of a tensor.

    On x86 they want a multiple of 16 bytes, and an array of NumPy may begin at any multiple of 8. No other dtype minds.
    The host cannot copy what lies on a device, and CUDA has an error of its own for such an address.
    """
    return any(tensor.is_cpu and tensor.data_ptr() % 16 for tensor in tensors)


def _divide(tensor: Tensor, divisor: int) -> None:
    # MPI writes to an address, which autograd and the thread's modes do not see. torch must write in the same way.
    with torch.inference_mode():
        tensor.div_(divisor)
