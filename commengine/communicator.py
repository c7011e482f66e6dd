"""Communicator: a group of ranks that runs collectives on torch tensors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import operators
from .agreement import agree
from .checks import INT_MAX, ArgumentChecks, TensorLike, is_c_int
from .dtypes import reduction_error
from .errors import CollectiveError
from .host import HostTransport, TransferError, load_mpi
from .shared import SharedTensors
from .stream import GroupedWork, Stream, Work, finished_work
from .trace import CollectiveEvent, Trace, begin
from .watch import Watch, WatchedGroup, check_timeout

if TYPE_CHECKING:
    from mpi4py import MPI


class Communicator(ArgumentChecks):
    """A group of ranks that runs collectives on tensors, over a duplicate of the caller's MPI communicator.

    mpi_comm: any mpi4py intracommunicator; what the caller does with it is never seen here, nor the reverse.
    device: "cpu", or None to choose. (The device path is not part of this version.)
    checked: before each collective the group agrees on operation, shape, dtype, reduction, root and stream; if it
        does not, every rank raises `CollectiveMismatch`. Costs a round trip: for finding faults.
    name: what errors and traces call the group.
    deterministic: every reduction of host tensors is in rank order, so that its bits depend on nothing but its inputs
        and the size of the group; MPI may choose by size, placement or luck. Costs a copy of the tensor, and time.
    timeout: seconds after which a collective that is not done ends the job, with a report that names the ranks which
        are missing; holds for what is split from it, too. Below THREAD_MULTIPLE: see `commengine.watch`.

    Every rank of ``mpi_comm`` must construct it, and later `close` it: both are collective. All operations are
    collective over the group, except `send`, `recv` and `sendrecv`. Tensors are contiguous; 0-d and empty ones and
    groups of one rank work. An operation given ``stream=`` is enqueued there and returns at once; the tensors may be
    touched again after ``work.wait()``. Without, it is done on return, and so is the Work. A collective changes its
    output in place, behind autograd's back: `tplayers` has the differentiable forms.

    Raises `CollectiveError` where the arguments show that the operation cannot be done, before anything is sent.
    """

    def __init__(
        self,
        mpi_comm: MPI.Intracomm,
        *,
        device: str | None = None,
        checked: bool = False,
        deterministic: bool = False,
        name: str = "world",
        timeout: float | None = None,
    ) -> None:
        mpi = load_mpi()
        if device not in (None, "cpu"):
            raise CollectiveError(f"device={device!r}: this version of commengine moves host tensors only; use 'cpu'")
        if not mpi.Is_initialized() or mpi.Is_finalized():
            raise CollectiveError("MPI is not running: a Communicator needs MPI initialised and not yet finalised")
        if not isinstance(mpi_comm, mpi.Comm) or mpi_comm == mpi.COMM_NULL or mpi_comm.Is_inter():
            raise CollectiveError(f"Communicator needs an MPI intracommunicator, not {mpi_comm!r}")
        check_timeout(timeout)
        own = mpi_comm.Dup()
        self._root_watch = None if timeout is None else Watch(mpi_comm.Dup(), timeout)
        watched = None if self._root_watch is None else self._root_watch.group(own, name)
        self._own(own, checked, deterministic, name, watched)

    def _own(self, comm: Any, checked: bool, deterministic: bool, name: str, watched: WatchedGroup | None) -> None:
        """Take over ``comm``, which nobody else knows."""
        self.mpi: MPI.Intracomm = comm
        # Inherited from the caller's: an error must not end the process before it can be told.
        comm.Set_errhandler(load_mpi().ERRORS_RETURN)
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.world_rank: int = load_mpi().COMM_WORLD.rank
        self.device = torch.device("cpu")
        self.checked = checked
        self.name = name
        self._failures: tuple[type[Exception], ...] = (load_mpi().Exception, TransferError)
        self._watched = watched
        self._shared = SharedTensors(comm)
        self.deterministic = deterministic
        self._host: Any = self._new_host(comm)
        self._streams: list[Stream] = []
        self._logs: tuple[Trace, ...] = ()
        self._group: list[tuple[str, tuple[Any, ...], Tensor | None, dict[str, Any], GroupedWork]] | None = None
        self._slow = checked  # whether a call takes more looks than one
        #: names this communicator in a compiled graph
        self.handle = operators.register(self)

    def _new_host(self, comm: Any, *, polling: bool = False) -> HostTransport:
        return HostTransport(
            comm, polling=polling, look=self._look(), shared=self._shared, deterministic=self.deterministic
        )

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
        if (problem := reduction_error(tensor.dtype, op)) is not None:
            raise self._error("all_reduce", problem)
        return self._run("all_reduce", (tensor, op), tensor, stream, redop=op)

    def reduce(self, tensor: TensorLike, root: int = 0, op: str = "sum", *, stream: Stream | None = None) -> Work:
        """Reduce ``tensor`` over the group into ``root``'s tensor; elsewhere it is left as it is."""
        tensor = self._checked_tensor("reduce", tensor)
        if (problem := reduction_error(tensor.dtype, op)) is not None:
            raise self._error("reduce", problem)
        root = self._check_rank("reduce", "root", root)
        return self._run("reduce", (tensor, root, op), tensor, stream, redop=op, root=root)

    def reduce_scatter(
        self, output: TensorLike, input: TensorLike, op: str = "sum", *, stream: Stream | None = None
    ) -> Work:
        """Reduce ``input`` [size * d0, ...] over the group; rank r gets rows r * d0 ... in ``output`` [d0, ...]."""
        output, input = self._checked_pair("reduce_scatter", output, input, whole="input")
        if (problem := reduction_error(input.dtype, op)) is not None:
            raise self._error("reduce_scatter", problem)
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

        Collectives of the group run in their order. The tensors may be touched when the block has ended, or, with
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
        transfers: list[tuple[str, Tensor, int]] = []
        collectives = []
        for name, args, tensor, about, _ in group:
            if name == "sendrecv":
                transfers += [("send", *args[:2]), ("recv", *args[2:])]
            elif name in ("send", "recv"):
                transfers.append((name, *args))
            else:
                collectives.append((name, args, tensor, about))
        sizes = sum(part.nbytes for _, part, _ in transfers)
        if transfers:
            peers = tuple(dict.fromkeys(peer for *_, peer in transfers))
            self._run("exchange", (transfers,), transfers[0][1], stream, nbytes=sizes, peers=peers)
        for name, args, tensor, about in collectives:
            self._run(name, args, tensor, stream, **about)
        whole = _DONE if stream is None else stream.record()
        for *_, work in group:
            work.started(whole)

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor in memory that all ranks of a node share: large collectives on it copy nothing.

        all_reduce, reduce_scatter (``input``), all_gather (either tensor) and broadcast use it, from 32 kB on, where
        every rank gives its tensor of the same call, or the same part of it. Private memory where the group spans
        nodes, or is one rank. Collective; the same shape and dtype on every rank. The memory lives until `close`, or,
        where a tensor still refers to it then, as long as the process.
        """
        self._live_mpi()
        with self._watching("empty", "life"):
            return self._shared.empty(shape, dtype)

    # Streams, groups, life ------------------------------------------------------------------------------------

    def new_stream(self) -> Stream:
        """An ordered queue that runs beside the caller. Collective: every rank, in the same order."""
        mpi = load_mpi()
        index = len(self._streams) + 1
        comm = self._live_mpi()
        with self._watching("new_stream", "life"):
            transport = self._new_host(comm.Dup(), polling=True)
        threaded = mpi.Query_thread() >= mpi.THREAD_MULTIPLE
        stream = Stream(f"{self.name}/stream{index}", index, transport, threaded=threaded)
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
            part = comm.Split(mpi.UNDEFINED if color is None else color, key)
        if self._watched is not None:
            self._watched.splits += 1
        if part == mpi.COMM_NULL:
            return None
        made = Communicator.__new__(Communicator)
        made._root_watch = None
        watched = None if self._watched is None else self._watched.part(part, name)
        made._own(part, self.checked, self.deterministic, name, watched)
        return made

    def close(self) -> None:
        """End the streams and free what was made from MPI; MPI itself is left alone. Collective; idempotent.

        Raises CollectiveError, everything freed, for a failure on a stream that nobody waited for.
        """
        if isinstance(self._host, _Closed):
            return
        host, self._host = self._host, _Closed(self)
        operators.unregister(self.handle)
        alive = not load_mpi().Is_finalized()
        with self._watching("close", "life"):
            for stream in self._streams:
                stream.close()
                if alive:
                    stream.transport.close()
                    stream.transport._comm.Free()
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

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        # After an exception the other ranks may not be here: a collective free would hang.
        if exception[0] is None:
            self.close()

    def _live_mpi(self) -> MPI.Intracomm:
        if isinstance(self._host, _Closed):
            raise self._error("new_stream, split or empty", "the communicator is closed")
        return self.mpi

    # Running --------------------------------------------------------------------------------------------------

    def _run(
        self,
        name: str,
        args: tuple[Any, ...],
        tensor: Tensor | None,
        stream: Stream | None,
        *,
        redop: str | None = None,
        root: int | None = None,
        nbytes: int | None = None,
        peers: tuple[int, ...] = (),
    ) -> Work:
        """Run or enqueue the transport's method ``name``. ``tensor`` stands for the call in checks and traces."""
        if self._slow:
            self._check_stream(name, stream)
            if self._group is not None:
                if stream is not None:
                    raise self._error(name, "inside coalesce() the stream goes to coalesce(stream=...)")
                work = GroupedWork()
                self._group.append((name, args, tensor, {"redop": redop, "root": root, "nbytes": nbytes}, work))
                return work
            if not peers:
                with self._watching(name, "agreeing", tensor, redop, root):
                    agree(self, name, tensor, redop, root, stream)
        if stream is None and not self._logs and self._watched is None:
            try:
                getattr(self._host, name)(*args)
            except self._failures as error:
                raise self._error(name, str(error)) from error
            return _DONE
        return self._run_observed(name, args, tensor, stream, redop, root, nbytes, peers)

    def _run_observed(
        self,
        name: str,
        args: tuple[Any, ...],
        tensor: Tensor | None,
        stream: Stream | None,
        redop: str | None,
        root: int | None,
        nbytes: int | None,
        peers: tuple[int, ...],
    ) -> Work:
        self._check_stream(name, stream)
        transport = self._host if stream is None else stream.transport
        record: CollectiveEvent | None = None
        if self._logs:
            size = (0 if tensor is None else tensor.nbytes) if nbytes is None else nbytes
            record = begin(name, tensor, self, None if stream is None else stream.name, redop, root, size)
            for log in self._logs:
                log.events.append(record)
        entry = None
        if self._watched is not None:
            lane = "" if stream is None else f"stream {stream.index}"
            entry = self._watched.enqueue(lane, name, tensor, redop, root, peers)

        def call() -> None:
            if record is not None:
                record.start = time.perf_counter()
            if entry is not None:
                entry.start()
            try:
                getattr(transport, name)(*args)
            except self._failures as error:
                raise self._error(name, str(error)) from error
            finally:
                if record is not None:
                    record.end = time.perf_counter()
                if entry is not None:
                    entry.end()

        if stream is None:
            call()
            return _DONE
        return stream.enqueue(call, args, record)

    @contextlib.contextmanager
    def _watching(self, operation: str, lane: str, *about: Any) -> Iterator[None]:
        """Around what is collective and no transport's method: it too must end in time."""
        if self._watched is None:
            yield
            return
        entry = self._watched.enqueue(lane, operation, *about)
        entry.start()
        try:
            yield
        finally:
            entry.end()

    def _check_stream(self, operation: str, stream: Stream | None) -> None:
        if isinstance(self._host, _Closed):
            getattr(self._host, operation)
        if stream is not None and stream not in self._streams:
            name = getattr(stream, "name", repr(stream))
            raise self._error(operation, f"stream {name} was not made by this communicator")


class _Closed:
    """Stands for the transport of a closed communicator, so that no call pays for asking whether it is open."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __getattr__(self, operation: str) -> Any:
        raise self._comm._error(operation, "the communicator is closed")


_DONE = finished_work()
