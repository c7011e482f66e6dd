"""The backends for a communicator's device tensors: NCCL on CUDA streams, or MPI through pinned host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from commengine.dtypes import COMPLEX_TYPES, NCCL_REDUCTIONS
from commengine.errors import CollectiveError
from commengine.mpi import load_mpi
from commengine.stream import Work

from .capture import is_over
from .choice import DeviceLike, choose_device, stays_on_host
from .clock import DeviceClock, DeviceTimes
from .nccl import NcclWire, Runtime, load_runtime, together
from .staged import HostedBackend
from .stream import DeviceStream

if TYPE_CHECKING:
    from mpi4py import MPI

    from commengine.timeout.entries import Entry
    from commengine.trace import CollectiveEvent


class NcclBackend:
    """Device tensors by NCCL: collectives are enqueued on CUDA streams, and the host goes on.

    clock: measures the times of traced collectives; None: a clock of its own.
    """

    def __init__(self, transport: NcclWire, clock: DeviceClock | None = None) -> None:
        self.transport: Any = transport
        self.device, self.runtime = transport.device, transport.runtime
        self.clock = clock or DeviceClock(self.runtime.cuda, self.device)

    def refusal(self, dtype: torch.dtype, op: str) -> str | None:
        """Return why NCCL cannot reduce ``dtype`` with ``op`` although the host can, or None."""
        if (dtype, op) in NCCL_REDUCTIONS:
            return None
        if dtype in COMPLEX_TYPES:
            return f"NCCL cannot multiply {dtype}: only sum and avg are possible on a device"
        return f"NCCL has no {dtype} to reduce: convert it to torch.int32, or reduce it on the host"

    def enqueue(
        self,
        launch: Callable[[], None],
        tensors: tuple[Any, ...],
        stream: DeviceStream | None,
        record: CollectiveEvent | None,
        entries: Sequence[Entry],
    ) -> Work | None:
        """Call ``launch``, which enqueues collectives, and time and watch them.

        tensors: kept alive until they are done. stream: the stream that they go to; None: torch's current one, and the
        result is None, because everything that is enqueued on that stream later waits by itself. record: gets the
        times. entries: the watcher's entries, one for each collective.
        """
        queue = self.runtime.cuda.current_stream(self.device) if stream is None else stream.cuda_stream
        times = None if record is None else DeviceTimes(self.clock)

        def run() -> None:
            if times is not None:
                times.mark("start", queue)
            launch()
            if times is not None:
                times.mark("end", queue)

        if record is not None:
            record.times = times
        for entry in entries:
            entry.start()
        try:
            if stream is None:
                run()
                work, event = None, queue.record_event() if entries else None
            else:
                work = stream.enqueue(run, tensors, record)
                event = work.event
        except BaseException:
            for entry in entries:
                entry.end()
            raise
        for entry in entries:
            entry.done = functools.partial(is_over, event)
        return work

    def split(self, group: MPI.Intracomm, part: MPI.Intracomm | None) -> NcclBackend | None:
        """Return the backend of this rank's part of the group; None if it has no part.

        Collective over the group. Raises CollectiveError on every rank or on none.
        """
        made = together(group, lambda: None if part is None else NcclWire.open(self.runtime, part, self.device))
        return None if made is None else NcclBackend(made, self.clock)

    def new_stream(
        self, comm: MPI.Intracomm, name: str, index: int, priority: int, owner: Callable[[], Any]
    ) -> DeviceStream:
        """Return a CUDA stream with an NCCL communicator of its own, over the ranks of ``comm``. Collective.

        priority: of the CUDA stream, -1 (high) or 0. owner: as of `Stream`. Raises CollectiveError on every rank or on
        none.
        """
        cuda_stream = self.runtime.cuda.Stream(self.device, priority)
        wire = NcclWire.open(self.runtime, comm, self.device, cuda_stream)
        return DeviceStream(name, index, wire, cuda_stream, owner)

    def close(self) -> None:
        """End the NCCL communicator. Collective."""
        self.transport.close()

    def abort(self) -> None:
        """End the NCCL communicator without the other ranks."""
        self.transport.abort()


Backend = NcclBackend | HostedBackend


def open_backend(
    comm: MPI.Intracomm,
    host: Any,
    device: DeviceLike,
    transport: str,
    *,
    cuda: Any = torch.cuda,
    load: Callable[[], Runtime] = load_runtime,
) -> tuple[Backend | None, str | None]:
    """Return the backend for device tensors between the ranks of ``comm``, or None and why there is none. Collective.

    host: the routes of host tensors. device, transport: see `Communicator`. Both results are None if the CPU was asked
    for, or if ``device`` is None and no rank has a CUDA device. If ``device`` is None and some
    rank cannot use the device that it has, the second result says why, on every rank. Raises CollectiveError on every
    rank when a rank cannot have what is asked for.
    """
    if stays_on_host(comm, device, cuda):
        return None, None
    try:
        return _open(comm, host, device, transport, cuda, load), None
    except CollectiveError as error:  # on every rank
        if device is not None:
            raise
        return None, str(error)


def _open(
    comm: MPI.Intracomm, host: Any, device: DeviceLike, transport: str, cuda: Any, load: Callable[[], Runtime]
) -> Backend:
    chosen, runtime = choose_device(comm, device, transport, cuda=cuda, load=load)
    if runtime.nccl is not None:
        return NcclBackend(NcclWire.open(runtime, comm, chosen))

    def make() -> HostedBackend:
        if load_mpi().Query_thread() < load_mpi().THREAD_SERIALIZED:
            raise CollectiveError(
                "transport='staged': autograd calls the collectives of a device's backward pass from a thread of its "
                "own, and MPI was started without MPI.THREAD_SERIALIZED or more: start it with that, or use "
                "transport='nccl' or device='cpu'"
            )
        try:
            return HostedBackend(runtime, chosen, host)
        except RuntimeError as error:  # the device has no memory left, or is another process's alone
            raise CollectiveError(f"device={str(chosen)!r}: {error}") from error

    return together(comm, make)
