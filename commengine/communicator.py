"""Communicator: a group of ranks that runs collectives on torch tensors."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import compiled_ops
from .agreement import agree, each_number, extremes, integers
from .calls import ends
from .calls.dispatch import Dispatcher
from .calls.message_stream import MessageStream
from .calls.opening import open_group
from .calls.routes import Routes
from .calls.thread_stream import ThreadStream
from .device.backends import Backend, NcclBackend, open_backend
from .device.choice import DeviceLike
from .device.staged import HostedBackend
from .device.stream import DeviceStream
from .dtypes import DTYPES
from .errors import CollectiveError, call_error
from .host.polling import PollingCalls
from .host.switch_points import SwitchPoints
from .host.wire import MpiWire, Order
from .job_end import is_child_of_rank
from .mpi import OwnsCommunicators, load_mpi, making_communicators, ranks_in
from .operations import OperationCalls
from .operations.checks import INT_MAX, checked_tensor, is_c_int
from .shared_memory.windows import SharedTensors
from .stream import Stream
from .timeout.entries import WatchedGroup
from .timeout.watcher import Watch

if TYPE_CHECKING:
    from mpi4py import MPI


class Communicator(OperationCalls, OwnsCommunicators):
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
        The constructor, `split` and `close` are such collectives, from their first moment to their last. It also holds
        for communicators that are split from this one, until this one is closed. With an MPI below THREAD_MULTIPLE the
        call raises `CollectiveTimeout` (`commengine.timeout.watcher`).
    transport: how device tensors travel. "nccl"; "staged": by MPI, through pinned host memory.
    switch_points: the sizes from which on host collectives go through a node's shared memory, the same table on every
        rank; None: the table that was measured on a processor of the same maker as rank 0's. A table serves up to twice
        as many ranks on a node as it was measured with; beyond, MPI carries all.

    Every rank of ``mpi_comm`` must construct it, and later `close` it: both are collective. The ranks compare the
    arguments: if they differ, every rank raises `CollectiveMismatch`, and if one rank's are wrong, every rank raises
    `CollectiveError`. Only the numbers of devices may differ. A rank raises CollectiveError alone if MPI does not run
    there, ``mpi_comm`` is no intracommunicator, or it is a forked child.

    Every rank of the group calls each operation; `send`, `recv` and `sendrecv` are calls of the ranks that they name.
    The calls of one stream have the same order on all ranks, and so have those without a stream. An operation with
    ``stream=`` is enqueued there and returns at once; its tensors may be touched again after ``work.wait()``. An
    operation without a stream is done on return, and its Work is done, too. A collective writes its output in place,
    and autograd does not see it: `tplayers` has the differentiable forms.

    A tensor is a torch tensor, or an array with DLPack (NumPy, CuPy), of which the memory is used. It is dense and
    contiguous, lies on the host or on the group's device, and has a dtype of the table in `commengine.dtypes`, which
    says how each is reduced. 0-d tensors, empty tensors and groups of one rank work. Unless an operation says
    otherwise, the tensors of a call have one dtype, lie on one device and share no memory, and all ranks give the same
    shapes, dtype, reduction and root.

    On a device, NCCL's collectives are work of the device, and the host does not wait for them, except that the first
    one of a group or stream blocks until its ranks have connected. Without ``stream=`` they run on torch's current
    stream, in order with everything else that is enqueued there, and ``work.wait()`` makes the current stream wait.
    They cannot be captured into a CUDA graph. With the other transports a collective on a device tensor blocks the
    host, as one on a host tensor does.

    Each operation raises `CollectiveError` on the rank whose arguments show that it cannot be done. Nothing was sent
    then, and the group goes on; a rank whose own call is right waits. It raises CollectiveError also if the group
    is closed or has stopped, if another thread is inside a call, and if MPI or NCCL fails. `CollectiveMismatch` says
    which differences between the ranks are found. On a host stream ``work.wait()`` raises what fails after the call.
    """

    _backend: Backend | None
    _calls: Dispatcher
    _host: Routes

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
        switch_points: SwitchPoints | None = None,
    ) -> None:
        given = {
            "device": device, "checked": checked, "order": order, "transport": transport,
            "switch_points": switch_points,
        }  # fmt: skip
        comm, self._watch, points = open_group(mpi_comm, name, timeout, given)
        self._is_root = True
        watched = None if self._watch is None else self._watch.group(comm, name)
        self._set_up(comm, checked, order, name, watched, points)
        try:
            with self._calls.watching("device", "start"):
                backend, no_device = open_backend(comm, self._host, device, transport)
            self._use(backend)
            self.no_device = no_device
        except CollectiveError:  # on every rank
            self.close()
            raise
        except BaseException:
            self._abandon()
            raise

    def _set_up(
        self, comm: Any, checked: bool, order: Order | None, name: str, watched: WatchedGroup | None,
        points: SwitchPoints,
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
        self._backend = None
        self._watched = watched
        self._shared = SharedTensors(comm, name)
        self._streams: list[Stream] = []
        self._blocks: dict[int, Communicator] = {}
        self._host = self._new_host(comm)
        self._polled = PollingCalls(comm, self._look())
        self._calls = Dispatcher(self, self._host, watched)
        #: names this communicator in a compiled graph
        self.handle = compiled_ops.register(self)
        self._made_streams = 0
        #: what users of the communicator keep for it; it goes when the communicator is closed
        self.kept: dict[str, Any] = {}
        watch = self._watch if self._is_root else None
        self._dropped = weakref.finalize(self, _drop, name, self._streams, watch)
        self._dropped.atexit = False
        ends.follow(self)

    def _new_host(self, comm: Any, *, polling: bool = False) -> Routes:
        wire = MpiWire(comm, polling=polling, look=self._look(), order=self.order)
        return Routes(wire, self._shared, self.switch_points)

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
        return None if self._watch is None or self._watch.threaded else self._watch.look

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank={self.rank}, size={self.size})"

    # Memory, streams, groups, life --------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised host tensor in memory that the ranks of a node share. shape: an int is one dimension.

        Large collectives on such a tensor copy nothing. all_reduce, reduce_scatter (``input``), all_gather (either
        tensor) and broadcast use the memory in place, from their switch points on. Across nodes only all_reduce
        and reduce_scatter do. All ranks of a node must pass the tensor that one call of `empty` returned, or the same
        part of it. If a rank passes another tensor or a private one, all ranks of the node raise CollectiveMismatch.

        The tensor is in private memory if a node has only one rank of the group, if the nodes have different numbers of
        ranks, or if there is too little memory to share.

        Collective; the same shape and dtype on every rank. The first call waits for the group's host streams. Making
        the memory takes about as long as filling it, and counts against the timeout. The memory lives until `free` or
        `close`, and as long as a tensor on some rank still refers to it then. A tensor at an address that is no
        multiple of its itemsize counts as private. Raises CollectiveError on every rank if torch makes no such tensor
        or no collective takes it, and CollectiveMismatch if the ranks differ.
        """
        self._live_mpi()
        asked, problem = "empty", None
        shape = (shape,) if isinstance(shape, int) else shape
        try:
            like = torch.empty(tuple(shape), dtype=dtype, device="meta")
            if like.dtype not in DTYPES:
                raise TypeError(f"no collective takes {like.dtype}")
            asked = f"empty({str(like.dtype).removeprefix('torch.')} {list(like.shape)})"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if not self._shared.segments:
            self._drain_streams()
        with self._making("empty", asked, problem):
            return self._shared.empty(shape, dtype)

    def free(self, tensor: Tensor) -> None:
        """Give back the window in which ``tensor`` lies, which `empty` returned. Collective, with that tensor's parts.

        From then on the tensor is a private one. The system has the memory again when no rank has a tensor in it any
        more. It is no matter of the garbage collector, because all ranks must forget a window at the same moment: they
        would take different routes. A tensor in private memory is left as it is. It waits for the group's host streams.
        Raises CollectiveMismatch on every rank if the ranks give tensors in different windows, and CollectiveError if a
        rank gives no dense, contiguous tensor.
        """
        self._live_mpi()
        number, problem = None, None
        try:
            number = self._shared.window_of(checked_tensor(self, "free", tensor))
        except CollectiveError as error:
            problem = str(error).partition("free: ")[2]
        self._drain_streams()
        asked = "free(private memory)" if number is None else f"free(window {number})"
        with self._making("free", asked, problem):
            if number is not None:
                self._shared.free(number)

    def _drain_streams(self) -> None:
        """Let the host streams finish before the group's windows come or go.

        Otherwise the ranks would differ in whether a collective in flight finds that there are windows. Those that find
        one would compare the call in shared memory, and the others would wait in MPI.
        """
        for stream in self._streams:
            if isinstance(stream, ThreadStream):  # messages never go through a window
                stream.drain()

    @contextlib.contextmanager
    def _making(self, operation: str, asked: str | None = None, problem: str | None = None) -> Iterator[MPI.Intracomm]:
        """Watch what all ranks make together, after they have compared that they make the same.

        asked, problem: see `agree`; ``asked`` is ``operation`` if it has no arguments.
        """
        comm = self._live_mpi()
        if problem is not None:
            problem = f"group {self.name!r} (size {self.size}): {operation}: {problem}"
        with self._calls.watching(operation, "life"):
            agree(self, self._comparing, asked or operation, problem)
            yield comm

    @property
    def _comparing(self) -> Any:
        """The calls by which the ranks compare what they make.

        A checked collective that another rank calls instead compares, too, and must meet this comparison. An unchecked
        one must not be taken for it: MPI does not match a call that blocks with one that does not.
        """
        return self._host.wire.calls if self.checked else self._polled

    def compare(self, words: str, problem: str | None = None) -> None:
        """Raise CollectiveMismatch on every rank unless all ranks give the same words. Collective.

        problem: why this rank cannot do what it is about to do, or None. If a rank has a problem, every rank raises
        CollectiveError with the problems of all ranks.
        """
        self._live_mpi()
        with self._calls.watching("compare", "life"):
            agree(self, self._comparing, words, problem)

    def extremes(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the smallest and the largest of the ranks' numbers, at each place. Collective: 16 bytes a number.

        numbers: integers below 2^63 in size, as many on every rank; another one raises CollectiveError on its rank. So
        the ranks see whether they have the same, and no rank gets what every other one has.
        """
        self._live_mpi()
        numbers = integers(self, "extremes", numbers)
        with self._calls.watching("extremes", "life"):
            return extremes(self._comparing, numbers)

    def each_number(self, number: int) -> list[int]:
        """Return the numbers of all ranks, in their order. Collective: 8 bytes a rank.

        number: an integer below 2^63 in size; another one raises CollectiveError on its rank.
        """
        self._live_mpi()
        (number,) = integers(self, "each_number", [number])
        with self._calls.watching("each_number", "life"):
            return each_number(self._comparing, number, self.size)

    def new_stream(self, *, device: str | None = None, priority: int = -1, threaded: bool = True) -> Stream:
        """Return an ordered queue of collectives that runs beside the caller. Collective; in the same order everywhere.

        `Stream.close` gives it back, or `close` of the communicator. One that the program drops ends its thread when it
        has done what is enqueued, with a ResourceWarning; what MPI has of it stays until the communicator is closed.

        device: "cpu" for host tensors, "cuda" for tensors that NCCL carries; None: "cuda" if the group has NCCL. Device
        tensors that MPI carries go on host streams. priority: of a CUDA stream, -1 (high) or 0.

        threaded: False makes a host stream that takes messages of host tensors only: `send`, `recv`, `sendrecv`, and
        `coalesce` blocks of them. It has no thread that would take a core from the computation. MPI starts a message
        when it is enqueued, and its Work finishes it (`commengine.calls.message_stream`). Messages of the stream
        between two ranks match in the order in which they are enqueued; they may be waited for in any order. The
        timeout counts from the moment when somebody waits. CUDA streams, which have no thread, ignore it.

        Raises CollectiveError on every rank if one asks for a device that the group has not, or MPI has no communicator
        left, and CollectiveMismatch if the arguments differ.
        """
        mpi = load_mpi()
        index, problem = self._made_streams + 1, None
        backend, name = self._backend, f"{self.name}/stream{index}"
        kinds = ("cuda", "cpu") if isinstance(backend, NcclBackend) else ("cpu",)
        device = kinds[0] if device is None else device
        if device not in kinds:
            problem = f"device={device!r} is not {' or '.join(map(repr, kinds))}"
        asked = f"new_stream(number {index}, device={device!r}, priority={priority!r}, threaded={bool(threaded)})"
        owner = weakref.ref(self)
        stream: Stream
        with self._making("new_stream", asked, problem) as comm:
            if isinstance(backend, NcclBackend) and device != "cpu":
                stream = backend.new_stream(comm, name, index, priority, owner)
                self._alarm(stream.transport.failure)
            else:
                with making_communicators():
                    own = comm.Dup()
                if threaded:
                    transport = self._new_host(own, polling=True)
                    transport.open()
                    stream = ThreadStream(
                        name,
                        index,
                        transport,
                        owner,
                        threaded=mpi.Query_thread() >= mpi.THREAD_MULTIPLE,
                        device_transport=backend.over(transport) if isinstance(backend, HostedBackend) else None,
                        release=own.Free,
                    )
                else:
                    stream = MessageStream(name, index, Routes(MpiWire(own, look=self._look())), owner, own.Free)
            self._streams.append(stream)
            self._made_streams = index
        return stream.lend()

    def _close_stream(self, stream: Stream) -> None:
        """`Stream.close`."""
        if self._calls.refusal is not None:
            stream.abandon()
        else:
            stream.land()  # as in `_free`
            with self._making("close", f"close(stream {stream.index})"):
                stream.finish()
        if isinstance(stream, DeviceStream) and self._watched is not None:
            self._watched.alarms.remove(stream.transport.failure)
        stream.kept.clear()
        self._streams[:] = [one for one in self._streams if one.index != stream.index]
        if (untold := stream.untold_failure) is not None:
            raise call_error(
                self, "close", f"a collective failed on {stream.name}, and nobody waited: {untold}"
            ) from untold

    def coalesce(self, *, stream: Stream | None = None) -> contextlib.AbstractContextManager[None]:
        """Group the calls of a ``with`` block: they start together at its end, so sends and receives cannot deadlock.

        The block belongs to its thread: the calls of other threads run as if there were none.

        No call of a block may write memory that another call of the block reads or writes. If one does, CollectiveError
        is raised at the end of the block, before anything is sent, on each rank whose own tensors show it. broadcast
        and reduce count as writing their tensor on every rank, a reduce-scatter in place as writing its whole input.
        Only the root sees the whole of a gather or scatter: if that one depends on another call, the root raises, and
        the others wait. The collectives of a block are in the same order on every rank.

        The tensors may be touched when the block has ended, or, with ``stream=``, when the stream has reached the
        block's end; the Work of each call is done when the whole block is. If the block raises an exception, nothing is
        sent. A block inside a block raises CollectiveError, and so do a call with ``stream=`` of its own,
        `exchange_rows` and `exchange_counts`.
        """
        return self._calls.coalesce(stream)

    @contextlib.contextmanager
    def about(self, words: str) -> Iterator[None]:
        """Say what the calls of a ``with`` block are for, such as "stage 1, forward of micro-batch 3".

        The words stand in the timeout's reports, and in the errors of calls that began and failed: "recv #5 of group
        'pipeline' (stage 1, forward of micro-batch 3) is not done after ...". A call keeps the words with which it was
        enqueued. They hold for calls of this Communicator by this thread; in a block inside a block the inner words
        hold. Not collective.
        """
        said = self._calls.said
        before, said.words = said.words, words
        try:
            yield
        finally:
            said.words = before

    def split(self, color: int | None, key: int = 0, *, name: str = "split") -> Communicator | None:
        """Split the group: the ranks of each ``color`` form a Communicator, ordered by (key, rank).

        color: 0 or more, or None to join no part; the result is then None. name: the same on all ranks of a color.
        Collective over this group. The caller closes the result. Raises CollectiveError on every rank if an argument
        is wrong on one rank.
        """
        problem = None
        if color is not None and not is_c_int(color, 0):
            problem = f"color={color!r} must be None or an integer from 0 to {INT_MAX}"
        elif not is_c_int(key, -INT_MAX):
            problem = f"key={key!r} must be an integer from {-INT_MAX} to {INT_MAX}"
        return self._split("split", color, key, name, problem)

    def _split(
        self, operation: str, color: int | None, key: int, name: str, problem: str | None, asked: str | None = None
    ) -> Communicator | None:
        mpi = load_mpi()
        with self._making(operation, asked, problem) as comm:
            with making_communicators():
                part: Any = comm.Split(mpi.UNDEFINED if color is None else color, key)
            if self._watched is not None:
                self._watched.splits += 1
            backend: Backend | None = None
            try:
                if isinstance(self._backend, NcclBackend):
                    backend = self._backend.split(comm, None if part == mpi.COMM_NULL else part)
            except CollectiveError:  # on every rank
                if part != mpi.COMM_NULL:
                    part.Free()
                raise
        if part == mpi.COMM_NULL:
            return None
        made = Communicator.__new__(Communicator)
        made._watch, made._is_root = self._watch, False
        watched = None
        if self._watch is not None and self._watched is not None:
            watched = self._watch.split(self._watched, part, name)
        made._set_up(part, self.checked, self.order, name, watched, self.switch_points)
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
        fits = is_c_int(size, 1) and self.size % size == 0
        if not fits or size not in self._blocks:
            problem = None if fits else f"size={size!r} must be an integer that divides the group's size {self.size}"
            color, asked = self.rank // size if fits else 0, f"block({int(size) if fits else size!r})"
            made = self._split("block", color, 0, f"{self.name}/block{size}", problem, asked)
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
            self._backend.runtime.cuda.set_device(self.device)

    def world_ranks(self) -> list[int]:
        """Return the ranks of the group in MPI.COMM_WORLD, in the group's order. Not collective.

        Raises CollectiveError if the group is closed or has stopped.
        """
        return ranks_in(self._live_mpi(), load_mpi().COMM_WORLD)

    @property
    def node_size(self) -> int | None:
        """The number of the group's ranks on each node, if they share its memory. Collective the first time.

        None, on all ranks, if a node has only one of the ranks, if the nodes have different numbers of them, or if a
        node has no memory left to share.
        """
        self._live_mpi()
        with contextlib.nullcontext() if self._shared.looked else self._making("node_size"):
            node = self._shared.node
        return None if node is None else node.size

    def close(self) -> None:
        """End the streams and free what was made from MPI; MPI itself goes on. Collective; may be called again.

        One that takes no more calls after an exception (docs/design.md) is closed by each rank alone: its threads end,
        and its MPI communicators stay until MPI ends. A forked child closes nothing.

        If a collective failed on a stream of this communicator or of its blocks, and nobody waited for it, everything
        is freed, and then CollectiveError is raised. With a timeout, or if collectives are checked, the ranks first
        compare that all of them close; CollectiveMismatch leaves everything as it is.
        """
        if self._calls.closed:
            return
        if self._calls.refusal is not None:
            self._abandon()
            return
        untold = self._free()
        if untold:
            problem = f"a collective failed on a stream, and nobody waited: {untold[0]}"
            raise call_error(self, "close", problem) from untold[0]

    def _free(self) -> list[BaseException]:
        """Close this communicator and its blocks. Returns the failures of their streams that nobody was told about."""
        watched = self._watched
        untold: list[BaseException] = []
        for stream in self._streams:
            stream.land()  # before the time of `close` counts: a report then names the message and its peer
        with self._calls.watching("close", "life"):
            if self.checked or (watched is not None and (watched.left or not watched.over)):
                agree(self, self._comparing, "close")
            for part in self._blocks.values():
                untold += [] if part._calls.closed else part._free()
            self._blocks.clear()
            self._forget()
            for stream in self._streams:
                stream.finish()
            untold += [stream.untold_failure for stream in self._streams if stream.untold_failure is not None]
            self._streams.clear()
            if watched is not None:
                watched.alarms.clear()
            if self._backend is not None:
                self._backend.close()
            self._host.close()
            self._shared.close()
            self.mpi.Free()
            if self._watch is not None and self._is_root:
                self._watch.close()
        if self._watch is not None and watched is not None:
            self._watch.forget(watched)
        self._dropped.detach()
        return untold

    def _forget(self) -> None:
        """Take no more calls, and let go of what compiled graphs and users of the group and its streams keep."""
        self.kept.clear()
        for stream in self._streams:
            stream.kept.clear()
        compiled_ops.unregister(self.handle)
        self._calls.close()

    def end_with_mpi(self, reason: str) -> None:
        """Close on this rank alone: MPI is about to end, and the streams are finished."""
        if not self._calls.closed:
            self._calls.stop(reason, between=True)
            self._abandon()

    def end_in_child(self) -> None:
        """Refuse all calls in a forked child; its threads, memory and device are the parent's."""
        self._dropped.detach()
        self._calls.refuse_in_child()

    def _abandon(self) -> None:
        """Close what takes no more calls: the other ranks may be anywhere, so nothing here is collective."""
        if not is_child_of_rank():
            self._calls.tell()  # a second signal may have kept it from that
        for part in self._blocks.values():
            part._calls.stop(self._calls.stopped or "its communicator is closed", between=True)
            part._abandon()
        self._blocks.clear()
        self._forget()
        self._dropped.detach()
        if is_child_of_rank():  # the threads, the memory and the device are the parent's
            return
        for stream in self._streams:
            stream.abandon()
        self._streams.clear()
        if self._backend is not None:
            self._backend.abort()
        self._host.abandon()
        self._shared.abandon()
        if self._watch is not None and self._watched is not None:
            self._watched.alarms.clear()
            self._watch.forget(self._watched)
            if self._is_root:
                self._watch.abandon()

    def _live_mpi(self) -> MPI.Intracomm:
        self._calls.check_usable("new_stream, split, empty, compare or world_ranks")
        return self.mpi


def _drop(name: str, streams: list[Stream], watch: Watch | None) -> None:
    """End the threads of a communicator that nobody refers to any more. Waits for nothing: any thread may be here."""
    for stream in streams:
        stream.drop()
    if watch is not None:
        watch.drop()
    problem = "close it: MPI's communicators stay until then, and MPICH has 2048 of them"
    warnings.warn(f"Communicator {name!r} was dropped and not closed; {problem}", ResourceWarning, stacklevel=2)
