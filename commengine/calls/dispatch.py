"""The dispatcher: it hands a checked call of a Communicator to a transport.

A call takes one of three paths:

- direct: nobody compares, traces or watches the call, and it has no stream. This is the fast path. A collective like an
  earlier one does not even come here (`commengine.calls.known_calls`).
- observed: a call that runs on the host, perhaps on a stream's worker thread. It is compared on all ranks
  (``checked=True``), traced and watched.
- device: a call that NCCL runs on a stream, or that is observed. It is enqueued on a CUDA stream; several calls may be
  one launch.

A call that raises leaves the communicator as it was, or stops it (docs/design.md, "The life of a communicator").
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor

from commengine.agreement import agree, describe
from commengine.device.backends import Backend, NcclBackend
from commengine.device.staged import HostedBackend
from commengine.device.stream import DeviceStream
from commengine.errors import CollectiveError, TransferError, call_error
from commengine.mpi import load_mpi
from commengine.operations.exchange import EXCHANGE, Exchange, Transfer
from commengine.operations.messages import RECV, SEND
from commengine.operations.operation import Call, Operation
from commengine.operations.uneven.rows import UnevenOperation
from commengine.stream import DONE, Event, GroupedWork, Stream, Work, is_among
from commengine.timeout.entries import Entry, WatchedGroup
from commengine.trace import CollectiveEvent, Trace

from .blocks import check_independent, exchanges_first
from .failures import Said, busy_error, reason_of, transport_error
from .known_calls import KnownCalls
from .message_stream import MessageStream
from .routes import Routes

#: begins the error of each further call
_STOPPED = "the communicator takes no more calls (close it, and make another one)"


class Dispatcher:
    """Runs the calls of one communicator, whose arguments have been checked.

    comm: the `commengine.communicator.Communicator`. host: the routes of its host tensors. watched: its group at the
    watcher.
    """

    def __init__(self, comm: Any, host: Routes, watched: WatchedGroup | None) -> None:
        self.rank, self.size, self.name = comm.rank, comm.size, comm.name
        self.said = Said()
        self.closed = False
        self._between = False  # of the stop (`Flags.stop`)
        self.stopped: str | None = None  # why no call is taken any more, although the communicator is open
        # A call is under way: the test and the setting of it are one step for Python's threads. A call that raises
        # sets it back last, so that a second signal leaves it set, and not a communicator that seems whole.
        self.busy = False
        self.holder: int | None = None  # the thread of the call under way, if the call is a block (`_Block`)
        self._nccl: Any = None  # the transport of device tensors, if NCCL carries them
        self._hosted: HostedBackend | None = None  # the same, if MPI carries them
        self._comm, self._watched = weakref.proxy(comm), watched  # a group that is dropped goes at once
        self._failures: tuple[type[Exception], ...] = (load_mpi().Exception, TransferError, OverflowError)
        #: the traces that log the calls
        self.logs: tuple[Trace, ...] = ()
        #: the calls of the open coalesce() block of each thread
        self._blocks: dict[int, list[tuple[Call, GroupedWork]]] = {}
        self._direct = True
        self.host = host
        self._known = KnownCalls(self, host)
        #: the calls that skip the checks; None while calls without a stream are observed
        self.known: KnownCalls | None = None
        self._choose_path()

    def use(self, backend: Backend) -> None:
        """Let ``backend`` carry device tensors."""
        if isinstance(backend, NcclBackend):
            self._nccl = backend.transport
        else:
            self._hosted = backend

    def close(self) -> None:
        """Refuse all further calls."""
        self.closed = True
        self._choose_path()

    def _choose_path(self) -> None:
        """Note whether calls without a stream take the direct path, so that a call tests one attribute only."""
        observed = self._comm.checked or self.logs or self._watched is not None
        self._direct = not (self.closed or self.stopped or observed or self._blocks)
        self.known = self._known if self._direct else None

    # Life -----------------------------------------------------------------------------------------------------

    @property
    def refusal(self) -> str | None:
        """Why no call is taken, or None. Another rank of the node may have told."""
        if self.stopped is None and self.closed:
            return "the communicator is closed"
        if self.stopped is None and (told := self._comm._host.stopped) is not None:
            self.stop(told)
        return None if self.stopped is None else f"{_STOPPED}: {self.stopped}"

    def check_usable(self, operation: str) -> None:
        """Raise CollectiveError if no call is taken any more."""
        if (problem := self.refusal) is not None:
            error = call_error(self, operation, problem)
            error.in_step = False
            raise error

    def stop(self, reason: str, *, between: bool = False) -> None:
        """Refuse all further calls but `close`, and tell the ranks that share memory with this one.

        between: see `Flags.stop`.
        """
        if self.stopped is None:
            self.stopped, self._between = reason, between
            self._choose_path()
            self.tell()

    def tell(self) -> None:
        """Tell the ranks that share memory with this one that it has stopped. May be done again."""
        if self.stopped is not None:
            self._comm._host.stop(self.stopped, between=self._between)
            for stream in self._comm._streams:
                stream.stop(self.stopped, between=self._between)

    def failed(self, operation: str, error: BaseException) -> NoReturn:
        """End a call that began and raised ``error``: stop, unless the ranks are in step. Raises what the user gets."""
        self._settle(operation, error)
        self.busy, self.holder = False, None
        self._raise(operation, error)

    def left(self, operation: str, error: BaseException) -> NoReturn:
        """`failed`, for a call beside which others may be under way."""
        self._settle(operation, error)
        self._raise(operation, error)

    def _settle(self, operation: str, error: BaseException) -> None:
        if not (self.closed or getattr(error, "in_step", False)):
            self.stop(reason_of(self, operation, error))

    def _raise(self, operation: str, error: BaseException) -> NoReturn:
        if isinstance(error, self._failures):
            raise transport_error(self, operation, error) from error
        raise error

    def refuse_in_child(self) -> None:
        """Refuse all calls in a forked child, without a word to the other ranks: the group's rank is its parent."""
        self.stopped = "this process is a forked child, and the group's rank is its parent"
        self.busy, self._blocks = False, {}
        self._choose_path()

    # Calls ----------------------------------------------------------------------------------------------------

    def run(self, operation: Operation, args: tuple[Any, ...], stream: Stream | None) -> Work:
        """Run an operation, or enqueue it on ``stream``. args: the operation's, which have been checked."""
        if stream is not None:  # threads may enqueue at once, each on a stream of its own
            try:
                return self._run_or_collect(operation.called(args, self.size), stream)
            except BaseException as error:
                self.left(operation.name, error)
        if self._blocks and threading.get_ident() in self._blocks:
            return self._run_or_collect(operation.called(args, self.size), stream)
        if self.busy:
            self.refuse_second(operation.name)
        try:
            self.busy = True
            work: Work = DONE
            if not self._direct:
                work = self._run_or_collect(operation.called(args, self.size), stream)
            else:
                tensor = operation.standing(args)
                if tensor is None or tensor.is_cpu:
                    self.host.run(operation, args)
                elif self._hosted is None:
                    operation.by_nccl(self._nccl, *args)
                    self._known.learn(operation, args, self._nccl)
                else:
                    self._hosted.run(operation, args, self._hosted.ready())
                operation.mark(args, self.rank)
            self.busy = False
            return work
        except BaseException as error:
            self.failed(operation.name, error)

    def refuse_second(self, operation: str) -> NoReturn:
        """Raise the error of a call that begins while another one is under way, or seems to be."""
        if self.holder == threading.get_ident():  # a signal came where its block ends
            self.stop(f"rank {self.rank} left a call at {time.strftime('%H:%M:%S')} with a signal")
            self.busy, self.holder = False, None
            self.check_usable(operation)
        raise busy_error(self, operation)

    def _run_or_collect(self, call: Call, stream: Stream | None) -> Work:
        """Run a call, or keep it for the end of the open coalesce() block."""
        self._check_usable(call, stream)
        block = self._blocks.get(threading.get_ident()) if self._blocks else None
        if block is None:
            return self._run(call, stream)
        if stream is not None:
            raise call_error(self, call.name, "inside coalesce() the stream goes to coalesce(stream=...)")
        work = GroupedWork()
        block.append((call, work))
        return work

    def _run(self, call: Call, stream: Stream | None) -> Work:
        self._admit(call, stream)
        if self._is_nccl(call.tensor, stream):
            return self._run_on_device([call], stream)
        if isinstance(stream, MessageStream):
            error_of = functools.partial(transport_error, self, call.name, words=self.said.words)
            return stream.start(call, *self._notice(call, stream), error_of)
        return self._run_observed(call, stream)

    def _run_observed(self, call: Call, stream: Stream | None) -> Work:
        """Run a call on the host, traced and watched; on ``stream``, if there is one."""
        perform = self._bound(call, stream)
        record, entry = self._notice(call, stream)
        words = self.said.words  # a stream's worker has none

        def run() -> None:
            if record is not None:
                record.start = time.perf_counter()
            if entry is not None:
                entry.start()
            try:
                perform()
            except self._failures as error:
                raise transport_error(self, call.name, error, words) from error
            finally:
                if record is not None:
                    record.end = time.perf_counter()
                if entry is not None:
                    entry.end()

        if stream is None:
            run()
            return DONE
        return stream.enqueue(run, call.args, record, call)

    def _bound(self, call: Call, stream: Stream | None) -> Callable[[], None]:
        """Return what runs the call.

        For a device tensor it runs after everything that the caller's CUDA stream holds now, at the time of this call.
        """
        if call.tensor is None or call.tensor.is_cpu:
            routes = self.host if stream is None else stream.transport
            return functools.partial(routes.prepared(call.operation, call.args), *call.args)
        hosted: Any = self._hosted if stream is None else stream.device_transport
        return functools.partial(hosted.run, call.operation, call.args, hosted.ready())

    def _is_nccl(self, tensor: Tensor | None, stream: Stream | None) -> bool:
        """Whether NCCL runs a call. If the call has no tensor, its stream decides."""
        if self._nccl is None:
            return False
        return isinstance(stream, DeviceStream) if tensor is None else not tensor.is_cpu

    def _run_on_device(self, calls: list[Call], stream: Stream | None) -> Work:
        """Enqueue ``calls`` on the device, several of them as one launch."""
        transport: Any = self._nccl if stream is None else stream.transport
        transport.runtime.refuse_capture()
        noticed = [self._notice(call, stream) for call in calls]
        record = noticed[0][0]  # the first call of a launch gets the times of the launch
        entries = [entry for _, entry in noticed if entry is not None]

        def launch() -> None:
            with transport.group() if len(calls) > 1 else contextlib.nullcontext():
                for call in calls:
                    call.operation.by_nccl(transport, *call.args)

        tensors = tuple(call.args for call in calls)
        return self._comm._backend.enqueue(launch, tensors, stream, record, entries) or DONE

    def prepare_exchange(self, comm: Any, transfers: list[Transfer], stream: Stream | None) -> Exchange:
        """Return the messages as one object (`Communicator.exchange`). Their arguments have been checked."""
        self._check_usable(EXCHANGE.called((transfers,), self.size), stream)
        verbs = {"send": SEND, "recv": RECV}
        check_independent(
            self, [verbs[verb].called((one, peer), self.size) for verb, one, peer in transfers], "exchange"
        )
        routes, places = self.host if stream is None else stream.transport, {one.is_cpu for _, one, _ in transfers}
        if len(places) > 1:
            raise call_error(self, "exchange", "the tensors lie on the host and on a device: make an exchange of each")
        if not isinstance(routes, Routes) or False in places:
            return Exchange(comm, self, transfers, stream, None)
        routes.wire.free_requests(all=False)
        return Exchange(comm, self, transfers, stream, routes.wire)

    # Blocks ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def coalesce(self, stream: Stream | None) -> Iterator[None]:
        """Collect the calls of the block, and run them at its end (see `Communicator.coalesce`)."""
        thread = threading.get_ident()
        if thread in self._blocks:
            raise call_error(self, "coalesce", "is already open: groups do not nest")
        block: list[tuple[Call, GroupedWork]] = []
        try:
            self._blocks[thread] = block
            self._choose_path()
            yield
        finally:
            self._blocks.pop(thread, None)
            self._choose_path()
        with _Block(self, "coalesce", alone=stream is None):
            self._run_block(block, stream)

    def refuse_block(self, operation: str) -> None:
        """Raise CollectiveError if a coalesce() block of this thread is open, because its calls run at its end."""
        if threading.get_ident() in self._blocks:
            raise call_error(self, operation, "inside coalesce() it has no answer yet: call it before the block")

    def _run_block(self, block: list[tuple[Call, GroupedWork]], stream: Stream | None) -> None:
        calls = [call for call, _ in block]
        check_independent(self, calls)
        on_device, on_host = (
            exchanges_first([call for call in calls if self._is_nccl(call.tensor, stream) == nccl])
            for nccl in (True, False)
        )
        for call in (*on_device, *on_host):
            self._check_usable(call, stream)
        if on_device:
            for call in on_device:
                self._admit(call, stream)
            self._run_on_device(on_device, stream)
        works = []
        for call in on_host:
            try:
                works.append(self._run(call, stream))
            except CollectiveError as error:
                # What is left of the block runs on ranks that did not raise.
                error.in_step = error.in_step and (call is on_host[-1] or error.on_all_ranks)
                raise
        whole: Event = DONE
        if isinstance(stream, MessageStream) and works:
            whole = works[0]  # its one exchange, and not what was started before it: that may take longer
        elif stream is not None:
            whole = stream.record()
        for _, work in block:
            work.started(whole)

    # Observing ------------------------------------------------------------------------------------------------

    def attach(self, log: Trace) -> None:
        """Log all calls in ``log``, too; once, also if it is attached already."""
        self.logs = tuple(dict.fromkeys((*self.logs, log)))
        self._choose_path()

    def detach(self, log: Trace) -> bool:
        """Stop logging in ``log``. Returns whether it was attached."""
        attached = log in self.logs
        self.logs = tuple(other for other in self.logs if other is not log)
        self._choose_path()
        return attached

    @contextlib.contextmanager
    def watching(self, operation: str, sequence: str, *about: Any) -> Iterator[None]:
        """Watch a step of the communicator that is collective but no transport's method: it, too, must end in time.

        about: tensor, reduction and root, for the report. An error of MPI becomes a CollectiveError.
        """
        with _Block(self, operation, alone=sequence == "life"):
            entry = None
            if self._watched is not None:
                entry = self._watched.enqueue(sequence, operation, *about, words=self.said.words)
                entry.start()
            try:
                yield
            finally:
                if entry is not None:
                    entry.end()

    def _admit(self, call: Call, stream: Stream | None) -> None:
        """Compare a call on all ranks, and tell autograd what it writes."""
        self._agree(call, stream)
        call.operation.mark(call.args, self.rank)

    def _agree(self, call: Call, stream: Stream | None) -> None:
        """Compare a collective on all ranks, with ``checked=True``. Sends and receives may differ."""
        if self._comm.checked and not call.peers:
            turn = contextlib.nullcontext() if stream is None else _Block(self, call.name)  # else it has begun already
            with turn, self.watching(call.name, "agreeing", call.tensor, call.redop, call.root):
                number = 0 if stream is None else stream.index
                wire, about = self.host.wire, call.compared
                agree(self, wire.calls, describe(call.name, about, call.redop, call.root, number))
                if isinstance(call.operation, UnevenOperation):
                    unmatched = call.operation.unmatched(wire, *call.args)
                    agree(self, wire.calls, call.operation.common(*call.args), unmatched)

    def _notice(self, call: Call, stream: Stream | None) -> tuple[CollectiveEvent | None, Entry | None]:
        """Tell the traces and the watcher about a call that is about to be enqueued."""
        record = entry = None
        if self.logs:
            now, tensor = time.perf_counter(), call.tensor
            dtype = "none" if tensor is None else str(tensor.dtype).removeprefix("torch.")
            shape, elements = ((), 0) if tensor is None else (tuple(tensor.shape), tensor.numel())
            record = CollectiveEvent(
                call.name, call.redop, call.root, dtype, shape, elements, call.nbytes, self.name, self.size,
                None if stream is None else stream.name, now, now, peers=call.peers,
                buffers=tuple(self._buffer(one) for one in call.args if one is None or isinstance(one, Tensor)),
                rows=call.rows,
            )  # fmt: skip
            for log in self.logs:
                log.add(record)
        if self._watched is not None:
            sequence = "" if stream is None else f"stream {stream.index}"
            entry = self._watched.enqueue(
                sequence, call.name, call.tensor, call.redop, call.root, call.peers, words=self.said.words
            )
        return record, entry

    def _buffer(self, tensor: Tensor | None) -> tuple[int, bool]:
        """Return a tensor's bytes, and whether it lies in a window and is large enough to be used there in place."""
        if tensor is None:
            return 0, False
        shared = tensor.is_cpu and self._comm._shared.reaches(tensor)
        return tensor.nbytes, shared and tensor.nbytes >= self._comm.switch_points.least

    def _check_usable(self, call: Call, stream: Stream | None) -> None:
        """Check that the communicator is open, and that ``stream`` belongs to it and fits the tensor's device."""
        self.check_usable(call.name)
        if stream is None:
            return
        if not is_among(stream, self._comm._streams):
            name = getattr(stream, "name", repr(stream))
            what = "is closed" if getattr(stream, "closed", False) else "was not made by this communicator"
            raise call_error(self, call.name, f"stream {name} {what}")
        if isinstance(stream, MessageStream) and (problem := stream.refusal(call)):
            raise call_error(self, call.name, problem)
        tensor, on_device = call.tensor, isinstance(stream, DeviceStream)
        if tensor is not None and self._is_nccl(tensor, None) != on_device:
            kind = "a device" if on_device else "a host"
            raise call_error(
                self, call.name,
                f"stream {stream.name} is {kind} stream, the tensor lies on {tensor.device}: see new_stream",
            )  # fmt: skip


class _Block:
    """A ``with`` block that is one call of a dispatcher. An exception ends it as `Dispatcher.failed` says.

    alone: no other call may be under way but on streams.
    """

    def __init__(self, calls: Dispatcher, operation: str, *, alone: bool = True) -> None:
        self._calls, self._operation, self._alone = calls, operation, alone

    def __enter__(self) -> None:
        calls = self._calls
        if self._alone:
            if calls.busy:
                calls.refuse_second(self._operation)
            calls.busy, calls.holder = True, threading.get_ident()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        calls = self._calls
        if error is not None:  # also GeneratorExit: a signal came where a generator's block begins or ends
            (calls.failed if self._alone else calls.left)(self._operation, error)
        if self._alone:
            calls.busy, calls.holder = False, None
