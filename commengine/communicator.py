"""Communicator: a group of ranks that runs collectives on torch tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import compiled_ops as operators
from .calls.checks import INT_MAX, TensorLike, is_c_int
from .calls.dispatch import DONE, Call, Closed, Runs, exchanges_first
from .device.backends import Backend, HostedBackend, NcclBackend, open_backend
from .device.choice import DeviceLike, parse_device
from .errors import CollectiveError
from .host.switch_points import SwitchPoints, agreed
from .host.transport import HostTransport, TransferError
from .mpi import load_mpi, ranks_in
from .shared_memory.windows import SharedTensors
from .stream import GroupedWork, Stream, Work
from .timeout.watcher import Watch, WatchedGroup, check_timeout
from .trace import Trace

if TYPE_CHECKING:
    from mpi4py import MPI


class Communicator(Runs):
    """A group of ranks that runs collectives on tensors, over a duplicate of the caller's MPI communicator.

    mpi_comm: any mpi4py intracommunicator; what the caller does with it is never seen here, nor the reverse.
    device: where device tensors lie: "cuda:N", or "cuda" for one CUDA device per rank of a node, in turn; "cpu": this
        group has host tensors only. None: "cuda" where torch finds a device. Host tensors go by MPI in every case.
    checked: before each collective the group agrees on operation, shape, dtype, reduction, root and stream; if it
        does not, every rank raises `CollectiveMismatch`. Costs a round trip: for finding faults.
    name: what errors and traces call the group.
    deterministic: every reduction of host tensors is in rank order, so that its bits depend on nothing but its inputs
        and the size of the group; MPI may choose by size, placement or luck. Where MPI moves them it costs a copy of
        the tensor, and time; through memory nothing. Groups that span nodes then never reduce in two levels.
    timeout: seconds after which a collective that is not done ends the job, with a report that names the ranks which
        are missing; holds for what is split from it, too, until it is closed. Below THREAD_MULTIPLE: see
        `commengine.timeout.watcher`.
    transport: how device tensors travel: "nccl"; "mpi", an MPI that takes device addresses; "staged", through pinned
        host memory. cuda_aware_mpi: whether the MPI takes them; None: ask it.
    switch_points: from how many bytes on host collectives go through a node's memory; None: as measured on the
        machine of ``bench/results/switch_points-*.md``. The same table on every rank.

    Every rank of ``mpi_comm`` must construct it, and later `close` it: both are collective. All operations are
    collective over the group, except `send`, `recv` and `sendrecv`. Tensors are contiguous; 0-d and empty ones and
    groups of one rank work. An operation given ``stream=`` is enqueued there and returns at once; the tensors may be
    touched again after ``work.wait()``. Without, it is done on return, and so is the Work. A collective changes its
    output in place, behind autograd's back: `tplayers` has the differentiable forms.

    On a device, NCCL's collectives are the device's work and the host does not wait for them: without ``stream=`` they
    run on torch's current stream, after and before what else is put there, and ``work.wait()`` makes the current stream
    wait. The other transports block the host as host tensors do.

    Raises `CollectiveError` where the arguments show that the operation cannot be done, before anything is sent.
    """

    def __init__(
        self,
        mpi_comm: MPI.Intracomm,
        *,
        device: DeviceLike = None,
        checked: bool = False,
        deterministic: bool = False,
        name: str = "world",
        timeout: float | None = None,
        transport: str = "nccl",
        cuda_aware_mpi: bool | None = None,
        switch_points: SwitchPoints | None = None,
    ) -> None:
        mpi = load_mpi()
        parse_device(device)
        if not mpi.Is_initialized() or mpi.Is_finalized():
            raise CollectiveError("MPI is not running: a Communicator needs MPI initialised and not yet finalised")
        if not isinstance(mpi_comm, mpi.Comm) or mpi_comm == mpi.COMM_NULL or mpi_comm.Is_inter():
            raise CollectiveError(f"Communicator needs an MPI intracommunicator, not {mpi_comm!r}")
        check_timeout(timeout)
        points = agreed(mpi_comm, switch_points)
        own = mpi_comm.Dup()
        self._root_watch = None if timeout is None else Watch(mpi_comm.Dup(), timeout)
        watched = None if self._root_watch is None else self._root_watch.group(own, name)
        self._own(own, checked, deterministic, name, watched, points)
        try:
            with self._watching("device", "start"):
                backend = open_backend(own, self._host, device, transport, cuda_aware_mpi)
            self._use(backend)
        except CollectiveError:  # on every rank
            self.close()
            raise

    def _own(
        self, comm: Any, checked: bool, deterministic: bool, name: str, watched: WatchedGroup | None,
        points: SwitchPoints,
    ) -> None:  # fmt: skip
        """Take over ``comm``, which nobody else knows."""
        self.mpi: MPI.Intracomm = comm
        # Inherited from the caller's: an error must not end the process before it can be told.
        comm.Set_errhandler(load_mpi().ERRORS_RETURN)
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.world_rank: int = load_mpi().COMM_WORLD.rank
        self.checked = checked
        self.name = name
        self._failures: tuple[type[Exception], ...] = (load_mpi().Exception, TransferError)
        self._watched = watched
        self._shared = SharedTensors(comm)
        self.deterministic, self.switch_points = deterministic, points
        self._host: Any = self._new_host(comm)
        self._use(None)
        self._streams: list[Stream] = []
        self._logs: tuple[Trace, ...] = ()
        self._group: list[tuple[Call, GroupedWork]] | None = None
        self._slow = checked  # whether a call takes more looks than one
        #: names this communicator in a compiled graph
        self.handle = operators.register(self)

    def _new_host(self, comm: Any, *, polling: bool = False) -> HostTransport:
        return HostTransport(
            comm,
            polling=polling,
            look=self._look(),
            shared=self._shared,
            points=self.switch_points,
            deterministic=self.deterministic,
        )

    def _use(self, backend: Backend | None) -> None:
        """Let ``backend``, which nobody else knows, carry device tensors."""
        self._backend = backend
        self._device: Any = None if backend is None else backend.transport
        self.device = torch.device("cpu") if backend is None else backend.device
        if isinstance(backend, NcclBackend):
            self._alarm(backend.transport.failure)

    def _alarm(self, failure: Callable[[], str | None]) -> None:
        """Have ``failure`` asked by the watcher."""
        if self._watched is not None:
            self._watched.alarms.append(failure)

    def _look(self) -> Callable[[], None] | None:
        """What a rank without a watcher thread does while it waits."""
        watch = None if self._watched is None else self._watched.watch
        return None if watch is None or watch.threaded else watch.look

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank={self.rank}, size={self.size})"

    # Reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: TensorLike, op: str = "sum", *, stream: Stream | None = None) -> Work:
        """Reduce ``tensor`` over the group, in place, on every rank. op: sum, prod, min, max or avg."""
        tensor = self._checked_tensor("all_reduce", tensor)
        self._check_reduction("all_reduce", tensor, op)
        return self._run("all_reduce", (tensor, op), tensor, stream, redop=op)

    def reduce(self, tensor: TensorLike, root: int = 0, op: str = "sum", *, stream: Stream | None = None) -> Work:
        """Reduce ``tensor`` over the group into ``root``'s tensor; elsewhere it is left as it is."""
        tensor = self._checked_tensor("reduce", tensor)
        self._check_reduction("reduce", tensor, op)
        root = self._check_rank("reduce", "root", root)
        return self._run("reduce", (tensor, root, op), tensor, stream, redop=op, root=root)

    def reduce_scatter(
        self, output: TensorLike, input: TensorLike, op: str = "sum", *, stream: Stream | None = None
    ) -> Work:
        """Reduce ``input`` [size * d0, ...] over the group; rank r gets rows r * d0 ... in ``output`` [d0, ...]."""
        output, input = self._checked_pair("reduce_scatter", output, input, whole="input")
        self._check_reduction("reduce_scatter", input, op)
        return self._run("reduce_scatter", (output, input, op), input, stream, redop=op)

    # Movement -------------------------------------------------------------------------------------------------

    def all_gather(self, output: TensorLike, input: TensorLike, *, stream: Stream | None = None) -> Work:
        """Concatenate every rank's ``input`` [d0, ...] in rank order into ``output`` [size * d0, ...].

        In place where ``input`` is this rank's rows of ``output``.
        """
        output, input = self._checked_pair("all_gather", output, input, whole="output")
        return self._run("all_gather", (output, input), output, stream)

    def broadcast(self, tensor: TensorLike, root: int = 0, *, stream: Stream | None = None) -> Work:
        """Copy ``root``'s tensor into everybody's."""
        tensor = self._checked_tensor("broadcast", tensor)
        root = self._check_rank("broadcast", "root", root)
        return self._run("broadcast", (tensor, root), tensor, stream, root=root)

    def gather(
        self, output: TensorLike | None, input: TensorLike, root: int = 0, *, stream: Stream | None = None
    ) -> Work:
        """Concatenate every rank's ``input`` [d0, ...] into ``root``'s ``output`` [size * d0, ...] (None elsewhere)."""
        root = self._check_rank("gather", "root", root)
        input = self._checked_tensor("gather", input, "input")
        output = self._root_tensor("gather", "output", output, input, root)
        whole = input.nbytes * self.size
        return self._run("gather", (output, input, root), input, stream, root=root, nbytes=whole)

    def scatter(
        self, output: TensorLike, input: TensorLike | None, root: int = 0, *, stream: Stream | None = None
    ) -> Work:
        """Rank r gets r * d0 ... of ``root``'s ``input`` [size * d0, ...] (None elsewhere) as ``output`` [d0, ...]."""
        root = self._check_rank("scatter", "root", root)
        output = self._checked_tensor("scatter", output, "output")
        input = self._root_tensor("scatter", "input", input, output, root)
        whole = output.nbytes * self.size
        return self._run("scatter", (output, input, root), output, stream, root=root, nbytes=whole)

    def all_to_all(self, output: TensorLike, input: TensorLike, *, stream: Stream | None = None) -> Work:
        """Send block j of ``input`` to rank j, get rank j's in block j of ``output``; both [size * d0, ...]."""
        output = self._checked_tensor("all_to_all", output, "output")
        input = self._checked_tensor("all_to_all", input, "input")
        self._check_alike("all_to_all", output, input)
        if output.shape != input.shape or input.dim() == 0 or input.shape[0] % self.size:
            raise self._error(
                "all_to_all",
                f"output {list(output.shape)} and input {list(input.shape)} must have one shape whose dim 0 "
                f"the group's size {self.size} divides",
            )
        return self._run("all_to_all", (output, input), input, stream)

    def barrier(self, *, stream: Stream | None = None) -> Work:
        """Wait until every rank is here. On a stream: what is enqueued later starts when all ranks got here."""
        return self._run("barrier", (), None, stream)

    # Point to point -------------------------------------------------------------------------------------------

    def send(self, tensor: TensorLike, dst: int, *, stream: Stream | None = None) -> Work:
        """Send ``tensor`` to rank ``dst``, which must `recv` as many elements. May block until then: see `sendrecv`.

        A message is matched within one stream: both sides give their stream of the same number, or none.
        """
        tensor = self._checked_tensor("send", tensor)
        dst = self._check_rank("send", "dst", dst)
        return self._run("send", (tensor, dst), tensor, stream, root=dst, peers=(dst,))

    def recv(self, tensor: TensorLike, src: int, *, stream: Stream | None = None) -> Work:
        """Fill ``tensor`` with what rank ``src`` sends."""
        tensor = self._checked_tensor("recv", tensor)
        src = self._check_rank("recv", "src", src)
        return self._run("recv", (tensor, src), tensor, stream, root=src, peers=(src,))

    def sendrecv(
        self, sendtensor: TensorLike, dst: int, recvtensor: TensorLike, src: int, *, stream: Stream | None = None
    ) -> Work:
        """Send to ``dst`` while receiving from ``src``: exchanges in any pattern, without deadlock."""
        sent = self._checked_tensor("sendrecv", sendtensor, "sendtensor")
        received = self._checked_tensor("sendrecv", recvtensor, "recvtensor")
        self._check_disjoint("sendrecv", sent, received)
        dst = self._check_rank("sendrecv", "dst", dst)
        src = self._check_rank("sendrecv", "src", src)
        return self._run("sendrecv", (sent, dst, received, src), sent, stream, root=dst, peers=(dst, src))

    @contextlib.contextmanager
    def coalesce(self, *, stream: Stream | None = None) -> Iterator[None]:
        """Group the calls of the block: they start together at its end, so that sends and receives cannot deadlock.

        Host collectives of the group run in their order; NCCL's are one launch and have none, so that no call of the
        block may touch what another one writes. The tensors may be touched when the block has ended, or, with
        ``stream=``, when the stream has got there: every call's Work is done when all of the group is. An exception in
        the block sends nothing.
        """
        if self._group is not None:
            raise self._error("coalesce", "is already open: groups do not nest")
        self._group, self._slow = [], True
        try:
            yield
            group = self._group
        finally:
            self._group = None
            self._slow = self.checked
        host: list[Call] = []
        device: list[Call] = []
        for call, _ in group:
            (device if self._is_nccl(call.tensor, stream) else host).append(call)
        if device:
            device = exchanges_first(device)
            self._check_independent([(call.name, call.args) for call in device])
            self._run_on_device(device, stream)
        for call in exchanges_first(host):
            self._run(*call[:3], stream, **call.about)
        whole = DONE if stream is None else stream.record()
        for _, work in group:
            work.started(whole)

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised host tensor in memory that the ranks of a node share: large collectives on it copy nothing.

        all_reduce, reduce_scatter (``input``), all_gather (either tensor) and broadcast use it, from their switch
        points on, where every rank gives its tensor of the same call, or the same part of it (another on any rank of
        the node, or a private one, is CollectiveMismatch there); of a group that spans nodes the first two do.
        Private memory where a node has one rank of the group, or another number of them than the others, or too little
        to share. Collective; the same shape and dtype on every rank. The memory lives until `close`, or, where a tensor
        still refers to it then, as long as the process.
        """
        self._live_mpi()
        with self._watching("empty", "life"):
            return self._shared.empty(shape, dtype)

    # Streams, groups, life ------------------------------------------------------------------------------------

    def new_stream(self, *, device: str | None = None, priority: int = -1) -> Stream:
        """An ordered queue that runs beside the caller. Collective: every rank, in the same order.

        device: "cpu" for host tensors, "cuda" for those that NCCL carries; None: "cuda" where there is NCCL. priority:
        of a CUDA stream, -1 (high) or 0. The other transports' device tensors go on host streams.
        """
        mpi = load_mpi()
        index = len(self._streams) + 1
        comm = self._live_mpi()
        backend, name = self._backend, f"{self.name}/stream{index}"
        nccl = isinstance(backend, NcclBackend)
        if device not in ((None, "cpu", "cuda") if nccl else (None, "cpu")):
            raise self._error("new_stream", f"device={device!r} is not " + ("'cuda' or 'cpu'" if nccl else "'cpu'"))
        stream: Stream
        with self._watching("new_stream", "life"):
            if isinstance(backend, NcclBackend) and device != "cpu":
                stream = backend.new_stream(comm, name, index, priority)
                self._alarm(stream.transport.failure)
            else:
                transport = self._new_host(comm.Dup(), polling=True)
                transport.open_paths()
                threaded = mpi.Query_thread() >= mpi.THREAD_MULTIPLE
                stream = Stream(name, index, transport, threaded=threaded)
                if isinstance(backend, HostedBackend):
                    stream.device_transport = backend.over(transport).transport
        self._streams.append(stream)
        return stream

    def split(self, color: int | None, key: int = 0, *, name: str = "split") -> Communicator | None:
        """Part the group: ranks of one ``color`` form a Communicator, ordered by (key, rank); None for color None.

        Collective over this group. The caller closes the result.
        """
        mpi = load_mpi()
        if color is not None and not is_c_int(color, 0):
            raise self._error("split", f"color={color!r} must be None or an integer from 0 to {INT_MAX}")
        if not is_c_int(key, -INT_MAX):
            raise self._error("split", f"key={key!r} must be an integer from {-INT_MAX} to {INT_MAX}")
        comm = self._live_mpi()
        with self._watching("split", "life"):
            part: Any = comm.Split(mpi.UNDEFINED if color is None else color, key)
            backend: Backend | None = None
            if isinstance(self._backend, NcclBackend):
                backend = self._backend.split(None if part == mpi.COMM_NULL else part, color, key)
        if self._watched is not None:
            self._watched.splits += 1
        if part == mpi.COMM_NULL:
            return None
        made = Communicator.__new__(Communicator)
        made._root_watch = None
        watched = None if self._watched is None else self._watched.part(part, name)
        made._own(part, self.checked, self.deterministic, name, watched, self.switch_points)
        if isinstance(self._backend, HostedBackend):
            backend = self._backend.over(made._host)
        made._use(backend)
        return made

    def world_ranks(self) -> list[int]:
        """The ranks of the group in MPI.COMM_WORLD, in its order. Of this rank alone."""
        return ranks_in(self._live_mpi(), load_mpi().COMM_WORLD)

    @property
    def node_size(self) -> int | None:
        """Ranks of the group on each node, where they share its memory; None where they do not, or differ by node.

        Collective the first time.
        """
        self._live_mpi()
        node = self._shared.node
        return None if node is None else node.size

    def close(self) -> None:
        """End the streams and free what was made from MPI; MPI itself is left alone. Collective; idempotent.

        Raises CollectiveError, everything freed, for a failure on a stream that nobody waited for.
        """
        if isinstance(self._host, Closed):
            return
        host, self._host = self._host, Closed(self)
        self._device = self._host
        operators.unregister(self.handle)
        alive = not load_mpi().Is_finalized()
        with self._watching("close", "life"):
            for stream in self._streams:
                stream.close()
                if alive:
                    stream.free()
            if self._backend is not None:
                self._backend.close()
            if alive:
                host.close()
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
            raise self._error("close", problem) from untold[0]

    def __deepcopy__(self, memo: object) -> Communicator:
        """Itself: a copy of a layer belongs to the group that the layer belongs to."""
        return self

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        # After an exception the other ranks may not be here: a collective free would hang.
        if exception[0] is None:
            self.close()

    def _live_mpi(self) -> MPI.Intracomm:
        if isinstance(self._host, Closed):
            raise self._error("new_stream, split, empty or world_ranks", "the communicator is closed")
        return self.mpi
