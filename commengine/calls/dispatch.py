"""How a Communicator's call becomes a transport's: agreed on, traced, watched, run or enqueued."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from commengine.agreement import agree
from commengine.device.backends import NcclBackend
from commengine.device.stream import DeviceStream
from commengine.host.switch_points import SwitchPoints
from commengine.shared_memory.windows import SharedTensors
from commengine.stream import GroupedWork, Stream, Work, finished_work
from commengine.timeout.watcher import Entry, WatchedGroup
from commengine.trace import CollectiveEvent, Trace, begin

from .checks import ArgumentChecks


class Call(NamedTuple):
    """A transport's method and its arguments; ``tensor`` and ``about`` stand for it in checks, traces and reports."""

    name: str
    args: tuple[Any, ...]
    tensor: Tensor | None
    about: dict[str, Any]


def exchanges_first(group: list[Call]) -> list[Call]:
    """The calls of a group as they run: all point-to-point transfers as one exchange, then the collectives."""
    transfers: list[tuple[str, Tensor, int]] = []
    collectives = []
    for call in group:
        if call.name == "sendrecv":
            transfers += [("send", *call.args[:2]), ("recv", *call.args[2:])]
        elif call.name in ("send", "recv"):
            transfers.append((call.name, *call.args))
        else:
            collectives.append(call)
    if not transfers:
        return collectives
    peers = tuple(dict.fromkeys(peer for *_, peer in transfers))
    # A device tensor's transport takes host tensors too, the host's none of a device.
    stands = next((tensor for _, tensor, _ in transfers if not tensor.is_cpu), transfers[0][1])
    about = {"redop": None, "root": None, "nbytes": sum(part.nbytes for _, part, _ in transfers), "peers": peers}
    return [Call("exchange", (transfers,), stands, about), *collectives]


class Runs(ArgumentChecks):
    """The part of a Communicator behind its operations."""

    checked: bool
    _host: Any
    _device: Any
    _streams: list[Stream]
    _logs: tuple[Trace, ...]
    _group: list[tuple[Call, GroupedWork]] | None
    _slow: bool
    _shared: SharedTensors
    switch_points: SwitchPoints
    _watched: WatchedGroup | None
    _failures: tuple[type[Exception], ...]

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
            self._check_stream(name, stream, tensor)
            if self._group is not None:
                if stream is not None:
                    raise self._error(name, "inside coalesce() the stream goes to coalesce(stream=...)")
                about = {"redop": redop, "root": root, "nbytes": nbytes, "peers": peers}
                work = GroupedWork()
                self._group.append((Call(name, args, tensor, about), work))
                return work
            self._agree(name, tensor, stream, redop, root, peers)
        if stream is None and not self._logs and self._watched is None:
            try:
                getattr(self._host if tensor is None or tensor.is_cpu else self._device, name)(*args)
            except self._failures as error:
                raise self._error(name, str(error)) from error
            return DONE
        about = {"redop": redop, "root": root, "nbytes": nbytes, "peers": peers}
        if self._is_nccl(tensor, stream):
            return self._run_on_device([Call(name, args, tensor, about)], stream)
        return self._run_observed(Call(name, args, tensor, about), stream)

    def _agree(
        self, name: str, tensor: Tensor | None, stream: Stream | None, redop: str | None, root: int | None,
        peers: tuple[int, ...],
    ) -> None:  # fmt: skip
        if self.checked and not peers:
            with self._watching(name, "agreeing", tensor, redop, root):
                agree(self, name, tensor, redop, root, stream)

    def _notice(self, call: Call, stream: Stream | None) -> tuple[CollectiveEvent | None, Entry | None]:
        """Tell the traces and the watcher of a call that is about to be enqueued."""
        name, args, tensor, about = call
        redop, root, nbytes = about["redop"], about["root"], about["nbytes"]
        record = entry = None
        if self._logs:
            size = (0 if tensor is None else tensor.nbytes) if nbytes is None else nbytes
            lane = None if stream is None else stream.name
            buffers = tuple(self._buffer(one) for one in args if one is None or isinstance(one, Tensor))
            record = begin(name, tensor, self, lane, redop, root, size, about["peers"], buffers)
            for log in self._logs:
                log.add(record)
        if self._watched is not None:
            lane = "" if stream is None else f"stream {stream.index}"
            entry = self._watched.enqueue(lane, name, tensor, redop, root, about["peers"])
        return record, entry

    def _buffer(self, tensor: Tensor | None) -> tuple[int, bool]:
        """What a trace says of a tensor: its bytes, and whether it lies in a window, and is large enough to matter."""
        if tensor is None:
            return 0, False
        shared = tensor.is_cpu and self._shared.reaches(tensor)
        return tensor.nbytes, shared and tensor.nbytes >= self.switch_points.least

    def _run_observed(self, call: Call, stream: Stream | None) -> Work:
        name, args, tensor, _ = call
        self._check_stream(name, stream, tensor)
        if tensor is None or tensor.is_cpu:
            transport = self._host if stream is None else stream.transport
        else:
            transport = self._device if stream is None else stream.device_transport
        method = getattr(transport, name)  # now: of a device tensor, it is after what the current stream holds
        record, entry = self._notice(call, stream)

        def run() -> None:
            if record is not None:
                record.start = time.perf_counter()
            if entry is not None:
                entry.start()
            try:
                method(*args)
            except self._failures as error:
                raise self._error(name, str(error)) from error
            finally:
                if record is not None:
                    record.end = time.perf_counter()
                if entry is not None:
                    entry.end()

        if stream is None:
            run()
            return DONE
        return stream.enqueue(run, args, record)

    def _is_nccl(self, tensor: Tensor | None, stream: Stream | None) -> bool:
        """Whether a call is one of NCCL's; of those without a tensor the stream decides."""
        on_device = isinstance(stream, DeviceStream) if tensor is None else not tensor.is_cpu
        return on_device and isinstance(self._backend, NcclBackend)

    def _run_on_device(self, calls: list[Call], stream: Stream | None) -> Work:
        """Enqueue ``calls`` on the device, several as one launch."""
        for name, _, tensor, about in calls:
            self._check_stream(name, stream, tensor)
            if len(calls) > 1:
                self._agree(name, tensor, stream, about["redop"], about["root"], about["peers"])
        transport: Any = self._device if stream is None else stream.transport
        noticed = [self._notice(call, stream) for call in calls]
        record = noticed[0][0]  # the first of a launch has the launch's time
        entries = [entry for _, entry in noticed if entry is not None]

        def launch() -> None:
            try:
                with transport.group() if len(calls) > 1 else contextlib.nullcontext():
                    for call in calls:
                        getattr(transport, call.name)(*call.args)
            except self._failures as error:
                raise self._error(calls[0].name, str(error)) from error

        assert isinstance(self._backend, NcclBackend)
        return self._backend.enqueue(launch, tuple(call.args for call in calls), stream, record, entries) or DONE

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

    def _check_stream(self, operation: str, stream: Stream | None, tensor: Tensor | None = None) -> None:
        if isinstance(self._host, Closed):
            getattr(self._host, operation)
        if stream is not None and stream not in self._streams:
            name = getattr(stream, "name", repr(stream))
            raise self._error(operation, f"stream {name} was not made by this communicator")
        on_device = isinstance(stream, DeviceStream)
        if stream is not None and tensor is not None and self._is_nccl(tensor, None) != on_device:
            kind = "a device" if on_device else "a host"
            raise self._error(
                operation, f"stream {stream.name} is {kind} stream, the tensor lies on {tensor.device}: see new_stream"
            )


class Closed:
    """Stands for the transport of a closed communicator, so that no call pays for asking whether it is open."""

    def __init__(self, comm: ArgumentChecks) -> None:
        self._comm = comm

    def __getattr__(self, operation: str) -> Any:
        raise self._comm._error(operation, "the communicator is closed")


DONE = finished_work()
