"""Communicator: a group of ranks that runs collectives on torch tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import compiled_ops
from .agreement import agree
from .calls.checks import INT_MAX, call_error, is_c_int
from .calls.dispatch import Dispatcher
from .calls.group_calls import GroupCalls
from .device.backends import Backend, HostedBackend, NcclBackend, open_backend
from .device.choice import DeviceLike, parse_device
from .device.stream import DeviceStream
from .dtypes import ORDERS, Order
from .errors import CollectiveError, TransferError
from .host.operands import POOL_BYTES, Operands, agreed_limit
from .host.switch_points import SwitchPoints, agreed
from .host.transport import HostTransport
from .mpi import load_mpi, making_communicators, ranks_in, sleep_until_all
from .shared_memory.windows import SharedTensors
from .stream import Stream
from .timeout.entries import WatchedGroup
from .timeout.watcher import Watch, check_timeout
from .trace import Trace

if TYPE_CHECKING:
    from mpi4py import MPI

#: seconds between two looks of a rank that sleeps until the others come
_NAP_SECONDS = 1e-4


class Communicator(GroupCalls):
    """A group of ranks that runs collectives on tensors, over a duplicate of the caller's MPI communicator.

    mpi_comm: any mpi4py intracommunicator. Its own messages and those of the Communicator never mix.
    device: where device tensors lie. "cuda:N": this device; "cuda": one CUDA device for each rank of a node, in turn;
        "cpu": the group has host tensors only; None: "cuda" if every rank can use a device, else "cpu". Where torch
        finds one nevertheless, `no_device` says why, and so does the error of the first device tensor. Host tensors
        never use the device, and one rank needs no NCCL.
    checked: before each collective the group compares operation, shape, dtype, reduction, root and stream; if they
        differ, every rank raises `CollectiveMismatch`. It costs a round trip and is meant for finding faults.
    order: how host tensors are reduced, so that the bits of the result depend only on the inputs and the size of the
        group. None: MPI may choose an order by size, placement or timing. "rank": in rank order; halves are added in
        float32 and rounded once. Groups that span nodes then never reduce in two levels. "tree": ranks 0 and 1, 2 and
        3, and so on are reduced, then pairs of these results; every pair is rounded to the tensor's dtype. A group of
        fewer ranks whose tensors are such pairs already gets the same bits. Where MPI moves the data an order costs a
        copy of the tensor; in shared memory it costs nothing. NCCL has its own order on devices.
    name: the group's name in errors and traces.
    timeout: seconds after which a collective that is not done ends the job, with a report that names the missing ranks.
        It also holds for communicators that are split from this one, until this one is closed. For MPI below
        THREAD_MULTIPLE see `commengine.timeout.watcher`.
    transport: how device tensors travel. "nccl"; "mpi": by an MPI that takes device addresses; "staged": by any MPI,
        through pinned host memory.
    cuda_aware_mpi: whether the MPI takes device addresses; None: ask it.
    switch_points: the sizes from which on host collectives go through a node's shared memory, the same table on every
        rank; None: the table that was measured on a processor of the same maker as rank 0's.

    Every rank of ``mpi_comm`` must construct it, and later `close` it: both are collective. All operations are
    collective over the group, except `send`, `recv` and `sendrecv`. Tensors are contiguous; 0-d tensors, empty tensors
    and groups of one rank work. An operation with ``stream=`` is enqueued there and returns at once; its tensors may be
    touched again after ``work.wait()``. An operation without a stream is done on return, and its Work is done, too. A
    collective writes its output in place, and autograd does not see it: `tplayers` has the differentiable forms.

    On a device, NCCL's collectives are work of the device, and the host does not wait for them, except that the first
    one of a group or stream blocks until its ranks have connected. Without ``stream=`` they run on torch's current
    stream, in order with everything else that is enqueued there, and ``work.wait()`` makes the current stream wait.
    They cannot be captured into a CUDA graph. With the other transports a collective on a device tensor blocks the
    host, as one on a host tensor does.

    Raises `CollectiveError`, before anything is sent, if the arguments show that an operation cannot be done.
    """

    def __init__(
        self,
        mpi_comm: MPI.Intracomm,
        *,
        device: DeviceLike = None,
        checked: bool = False,
        order: Order | None = None,
        name: str = "world",
        timeout: float | None = None,
        transport: str = "nccl",
        cuda_aware_mpi: bool | None = None,
        switch_points: SwitchPoints | None = None,
        operand_bytes: int = POOL_BYTES,
    ) -> None:
        mpi = load_mpi()
        parse_device(device)
        if order is not None and order not in ORDERS:
            raise CollectiveError(f"order={order!r} is neither None nor one of {', '.join(ORDERS)}")
        if not mpi.Is_initialized() or mpi.Is_finalized():
            raise CollectiveError("MPI is not running: a Communicator needs MPI initialised and not yet finalised")
        if not isinstance(mpi_comm, mpi.Comm) or mpi_comm == mpi.COMM_NULL or mpi_comm.Is_inter():
            raise CollectiveError(f"Communicator needs an MPI intracommunicator, not {mpi_comm!r}")
        check_timeout(timeout)
        points, operand_bytes = agreed(mpi_comm, switch_points), agreed_limit(mpi_comm, operand_bytes)
        try:
            with making_communicators():
                own = mpi_comm.Dup()
                watching: Any = None if timeout is None else mpi_comm.Dup()
        except TransferError as error:
            raise CollectiveError(f"Communicator {name!r}: {error}") from error
        self._root_watch = None if timeout is None else Watch(watching, timeout)
        watched = None if self._root_watch is None else self._root_watch.group(own, name)
        self._set_up(own, checked, order, name, watched, points, operand_bytes)
        try:
            with self._calls.watching("device", "start"):
                backend, no_device = open_backend(own, self._host, device, transport, cuda_aware_mpi)
            self._use(backend)
            self.no_device = no_device
        except CollectiveError:  # on every rank
            self.close()
            raise

    def _set_up(
        self, comm: Any, checked: bool, order: Order | None, name: str, watched: WatchedGroup | None,
        points: SwitchPoints, operand_bytes: int,
    ) -> None:  # fmt: skip
        """Set all fields, and take over the MPI communicator ``comm``, which nobody else uses."""
        self.mpi: MPI.Intracomm = comm
        # The caller's error handler is inherited. It could end the process before an error can be reported.
        comm.Set_errhandler(load_mpi().ERRORS_RETURN)
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.world_rank: int = load_mpi().COMM_WORLD.rank
        self.checked, self.order, self.name, self.switch_points = checked, order, name, points
        self.device = torch.device("cpu")
        #: why the group has host tensors only although a rank finds a CUDA device and None was given as the device
        self.no_device = None
        self._backend: Backend | None = None
        self._watched = watched
        self._shared = SharedTensors(comm)
        self._operands = Operands(self._shared, points, operand_bytes)
        self._operand_bytes = operand_bytes
        self._streams: list[Stream] = []
        self._blocks: dict[int, Communicator] = {}
        self._host = self._new_host(comm)
        self._calls = Dispatcher(
            self.rank,
            self.size,
            name,
            self._host,
            checked=checked,
            streams=self._streams,
            shared=self._shared,
            watched=watched,
            least=points.least,
        )
        #: names this communicator in a compiled graph
        self.handle = compiled_ops.register(self)

    def _new_host(self, comm: Any, *, polling: bool = False) -> HostTransport:
        return HostTransport(
            comm,
            polling=polling,
            look=self._look(),
            shared=self._shared,
            points=self.switch_points,
            order=self.order,
        )

    def _use(self, backend: Backend | None) -> None:
        """Let ``backend``, which nobody else uses, carry device tensors; None: there are none."""
        if backend is None:
            return
        self._backend, self.device = backend, backend.device
        self._calls.use(backend)
        if isinstance(backend, NcclBackend):
            self._alarm(backend.transport.failure)

    def _alarm(self, failure: Callable[[], str | None]) -> None:
        """Let the watcher ask ``failure`` at every look."""
        if self._watched is not None:
            self._watched.alarms.append(failure)

    def _look(self) -> Callable[[], None] | None:
        """Return what this rank does while it waits, if it has no watcher thread."""
        watch = None if self._watched is None else self._watched.watch
        return None if watch is None or watch.threaded else watch.look

    def _attach_trace(self, log: Trace) -> None:
        self._calls.attach(log)

    def _detach_trace(self, log: Trace) -> bool:
        return self._calls.detach(log)

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank={self.rank}, size={self.size})"

    # Memory, streams, groups, life --------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised host tensor in memory that the ranks of a node share.

        Large collectives on such a tensor copy nothing. all_reduce, reduce_scatter (``input``), all_gather (either
        tensor) and broadcast use the memory in place, from their switch points on. Across nodes only all_reduce
        and reduce_scatter do. All ranks of a node must pass the tensor that one call of `empty` returned, or the same
        part of it. If a rank passes another tensor or a private one, all ranks of the node raise CollectiveMismatch.

        The tensor is in private memory if a node has only one rank of the group, if the nodes have different numbers of
        ranks, or if there is too little memory to share.

        Collective; the same shape and dtype on every rank. The first call waits for the group's host streams. The
        memory lives until `close`, and as long as the process if a tensor still refers to it then.
        """
        self._live_mpi()
        self._drain_streams()
        with self._calls.watching("empty", "life"):
            return self._shared.empty(shape, dtype)

    def operand(self, operation: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised host tensor that is to be an operand of ``operation``, and is used for a while only.

        If it is large enough (`shares_operand`), it lies in memory that the ranks of the node share, as a tensor of
        `empty` does, so that the collective copies nothing. It is the tensor that is reduced, or the ``output`` of an
        all-gather. Each rank takes its memory from a pool of its own, so the ranks' tensors may live for different
        times. The memory returns to the pool when no tensor refers to it any more: no view, nothing that autograd keeps
        for the backward, no collective in flight. If a rank has no room left, its tensor is private, and the collective
        takes the way of private tensors on all ranks.

        The first call for tensors of that size is collective; later calls are local. `close` frees the pool if no
        tensor on any rank refers to it any more. Otherwise it lives as long as the process.
        """
        if not self.shares_operand(operation, math.prod(shape) * dtype.itemsize, dtype):
            return torch.empty(shape, dtype=dtype, device="cpu")
        if not self._operands.opened:
            self._live_mpi()
            self._drain_streams()
            with self._making("operand"):
                self._operands.open()
        return self._operands.empty(shape, dtype)

    def shares_operand(self, operation: str, nbytes: int, dtype: torch.dtype) -> bool:
        """Whether `operand` takes a tensor of ``nbytes`` from shared memory, as long as there is room.

        Collective at the first call for an operation and a dtype, if the size may be large enough.
        """
        if nbytes < self._operands.floor:  # small collectives must not become slower
            return False
        least = self._operands.known.get((operation, dtype))
        if least is None:
            self._live_mpi()
            with self._making("shares_operand"):
                least = self._operands.look_up(operation, dtype)
        return nbytes >= least

    def _drain_streams(self) -> None:
        """Let the host streams finish before the group's first window is made.

        Otherwise the ranks would differ in whether a collective in flight finds that there are windows. Those that find
        one would compare the call in shared memory, and the others would wait in MPI.
        """
        for stream in () if self._shared.segments else self._streams:
            if not isinstance(stream, DeviceStream):
                stream.drain()

    @contextlib.contextmanager
    def _making(self, operation: str) -> Iterator[None]:
        """Watch what is made for operands; with ``checked``, first compare that all ranks make it."""
        with self._calls.watching(operation, "life"):
            if self.checked:
                agree(self, self._host.all_gather, operation)
            yield

    def new_stream(self, *, device: str | None = None, priority: int = -1) -> Stream:
        """Return an ordered queue of collectives that runs beside the caller. Collective; in the same order everywhere.

        device: "cpu" for host tensors, "cuda" for tensors that NCCL carries; None: "cuda" if the group has NCCL. Device
        tensors that MPI carries go on host streams. priority: of a CUDA stream, -1 (high) or 0.
        """
        mpi = load_mpi()
        index = len(self._streams) + 1
        comm = self._live_mpi()
        backend, name = self._backend, f"{self.name}/stream{index}"
        nccl = isinstance(backend, NcclBackend)
        if device not in ((None, "cpu", "cuda") if nccl else (None, "cpu")):
            problem = f"device={device!r} is not " + ("'cuda' or 'cpu'" if nccl else "'cpu'")
            raise call_error(self, "new_stream", problem)
        stream: Stream
        with self._calls.watching("new_stream", "life"):
            if isinstance(backend, NcclBackend) and device != "cpu":
                stream = backend.new_stream(comm, name, index, priority)
                self._alarm(stream.transport.failure)
            else:
                with making_communicators():
                    own = comm.Dup()
                transport = self._new_host(own, polling=True)
                transport.open_routes()
                stream = Stream(
                    name,
                    index,
                    transport,
                    threaded=mpi.Query_thread() >= mpi.THREAD_MULTIPLE,
                    device_transport=backend.over(transport).transport if isinstance(backend, HostedBackend) else None,
                    release=own.Free,
                )
        self._streams.append(stream)
        return stream

    def split(self, color: int | None, key: int = 0, *, name: str = "split") -> Communicator | None:
        """Split the group: the ranks of each ``color`` form a Communicator, ordered by (key, rank).

        color: 0 or more, or None to join no part; the result is then None. Collective over this group. The caller
        closes the result.
        """
        mpi = load_mpi()
        if color is not None and not is_c_int(color, 0):
            raise call_error(self, "split", f"color={color!r} must be None or an integer from 0 to {INT_MAX}")
        if not is_c_int(key, -INT_MAX):
            raise call_error(self, "split", f"key={key!r} must be an integer from {-INT_MAX} to {INT_MAX}")
        comm = self._live_mpi()
        with self._calls.watching("split", "life"):
            with making_communicators():
                part: Any = comm.Split(mpi.UNDEFINED if color is None else color, key)
            backend: Backend | None = None
            if isinstance(self._backend, NcclBackend):
                try:
                    backend = self._backend.split(comm, None if part == mpi.COMM_NULL else part, color, key)
                except CollectiveError:  # on every rank
                    if part != mpi.COMM_NULL:
                        part.Free()
                    raise
        if self._watched is not None:
            self._watched.splits += 1
        if part == mpi.COMM_NULL:
            return None
        made = Communicator.__new__(Communicator)
        made._root_watch = None
        watched = None if self._watched is None else self._watched.part(part, name)
        made._set_up(part, self.checked, self.order, name, watched, self.switch_points, self._operand_bytes)
        if isinstance(self._backend, HostedBackend):
            backend = self._backend.over(made._host)
        made._use(backend)
        made.no_device = self.no_device
        return made

    def block(self, size: int) -> Communicator:
        """The Communicator of ``size`` consecutive ranks that this rank is one of: ranks 0 to size - 1, and so on.

        It is made at the first call, collectively over the whole group, and closed with this Communicator; later calls
        return the same. Raises CollectiveError if ``size`` does not divide the group.
        """
        if size not in self._blocks:
            if size < 1 or self.size % size:
                raise call_error(self, "block", f"size={size} must divide the group's size {self.size}")
            made = self.split(self.rank // size, name=f"{self.name}/block{size}")
            assert made is not None
            self._blocks[size] = made
            for log in self._calls.logs:
                log.follow(made)
        return self._blocks[size]

    @property
    def blocks(self) -> tuple[Communicator, ...]:
        """The communicators that `block` has made so far."""
        return tuple(self._blocks.values())

    def make_device_current(self) -> None:
        """Make `device` torch's current CUDA device of this thread. Does nothing for the CPU. Not collective.

        The current device is where torch puts what names no device: pinned memory, streams, ``torch.cuda.synchronize``
        without an argument. A Communicator never changes it by itself, because it may belong to another program.
        `commengine.launch.run` calls this method.
        """
        if self._backend is not None:
            self._backend.make_current()

    def world_ranks(self) -> list[int]:
        """Return the ranks of the group in MPI.COMM_WORLD, in the group's order. Not collective."""
        return ranks_in(self._live_mpi(), load_mpi().COMM_WORLD)

    @property
    def node_size(self) -> int | None:
        """The number of the group's ranks on each node, if they share its memory. Collective the first time.

        None, on all ranks, if a node has only one of the ranks, if the nodes have different numbers of them, or if a
        node has no memory left to share.
        """
        self._live_mpi()
        node = self._shared.node
        return None if node is None else node.size

    def wait_for_all(self) -> None:
        """Wait until every rank is here, and leave the core to others meanwhile. Collective.

        `barrier` is done sooner, and keeps its core: it would slow down the ranks that still work, where there are more
        ranks than cores. A rank sleeps 0.1 ms at a time.
        """
        comm = self._live_mpi()
        with self._calls.watching("wait_for_all", "life"):
            sleep_until_all(comm, _NAP_SECONDS, self._look())

    def close(self) -> None:
        """End the streams and free what was made from MPI; MPI itself goes on. Collective; may be called again.

        If a collective failed on a stream and nobody waited for it, everything is freed, and then CollectiveError is
        raised.
        """
        if self._calls.closed:
            return
        for part in self._blocks.values():
            part.close()
        self._blocks.clear()
        compiled_ops.unregister(self.handle)
        alive = not load_mpi().Is_finalized()
        with self._calls.watching("close", "life"):
            self._calls.close()
            for stream in self._streams:
                stream.close()
                if alive:
                    stream.free()
            if self._backend is not None:
                self._backend.close()
            if alive:
                self._host.close()
                self._shared.close()
                self.mpi.Free()
        untold = [stream.untold_failure for stream in self._streams if stream.untold_failure is not None]
        self._streams.clear()
        if self._watched is not None:
            self._watched.watch.forget(self._watched)
        if self._root_watch is not None:
            self._root_watch.close()
        if untold:
            problem = f"a collective failed on a stream, and nobody waited: {untold[0]}"
            raise call_error(self, "close", problem) from untold[0]

    def __deepcopy__(self, memo: object) -> Communicator:
        """Return the communicator itself: a copied layer belongs to the same group."""
        return self

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        # After an exception the other ranks may not be here, and a collective free would hang.
        if exception[0] is None:
            self.close()

    def _live_mpi(self) -> MPI.Intracomm:
        if self._calls.closed:
            problem = "the communicator is closed"
            raise call_error(self, "new_stream, split, empty, wait_for_all or world_ranks", problem)
        return self.mpi
