"""The backends for a communicator's device tensors: NCCL on CUDA streams, or MPI through the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from commengine.agreement import raise_together
from commengine.dtypes import COMPLEX_TYPES, NCCL_REDUCTIONS
from commengine.errors import CollectiveError
from commengine.host.transport import HostTransport
from commengine.mpi import load_mpi
from commengine.stream import Stream, Work

from .capture import is_over
from .choice import DeviceLike, choose_device, stays_on_host
from .clock import DeviceClock, DeviceTimes
from .nccl import DeviceTransport, Runtime, load_runtime
from .staged import Hosted, StagedTransport, device_address_transport, mpi_takes_device_addresses
from .stream import DeviceStream, DeviceWork

if TYPE_CHECKING:
    from mpi4py import MPI

    from commengine.timeout.entries import Entry
    from commengine.trace import CollectiveEvent


class NcclBackend:
    """Device tensors by NCCL: collectives are enqueued on CUDA streams, and the host goes on.

    clock: measures the times of traced collectives; None: a clock of its own.
    """

    def __init__(self, transport: DeviceTransport, clock: DeviceClock | None = None) -> None:
        self.transport: Any = transport
        self.device = transport.device
        self.clock = clock or DeviceClock(transport.runtime.cuda, transport.device)

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
        stream: Stream | None,
        record: CollectiveEvent | None,
        entries: Sequence[Entry],
    ) -> Work | None:
        """Call ``launch``, which enqueues collectives, and time and watch them.

        tensors: kept alive until they are done. stream: the stream that they go to; None: torch's current one, and the
        result is None, because everything that is enqueued on that stream later waits by itself. record: gets the
        times. entries: the watcher's entries, one for each collective.
        """
        if record is not None:
            record.times = DeviceTimes(self.clock)
        for entry in entries:
            entry.start()
        try:
            if stream is not None:
                work = stream.enqueue(launch, tensors, record)
                event = work.event if isinstance(work, DeviceWork) else None
            else:
                work, event = None, self._enqueue_here(launch, record, bool(entries))
        except BaseException:
            for entry in entries:
                entry.end()
            raise
        for entry in entries:
            entry.done = functools.partial(is_over, event)
        return work

    def _enqueue_here(self, launch: Callable[[], None], record: CollectiveEvent | None, watched: bool) -> Any:
        if record is None and not watched:
            launch()
            return None
        current = self.transport.runtime.cuda.current_stream(self.device)
        if record is not None and record.times is not None:
            record.times.start(current)
        launch()
        if record is not None and record.times is not None:
            record.times.end(current)
        return current.record_event() if watched else None

    def make_current(self) -> None:
        """Make the device the current one of this thread."""
        self.transport.runtime.cuda.set_device(self.device)

    def split(
        self, group: MPI.Intracomm, part: MPI.Intracomm | None, color: int | None, key: int
    ) -> NcclBackend | None:
        """Return the backend of this rank's part of the group; None if it has no part.

        group, part, color, key: see `DeviceTransport.split`. Collective over the group. Raises CollectiveError on every
        rank or on none.
        """
        made = self.transport.split(group, part, color, key)
        return None if made is None else NcclBackend(made, self.clock)

    def new_stream(self, comm: MPI.Intracomm, name: str, index: int, priority: int) -> DeviceStream:
        """Return a CUDA stream with an NCCL communicator of its own, over the ranks of ``comm``. Collective.

        priority: of the CUDA stream, -1 (high) or 0. Raises CollectiveError on every rank or on none.
        """
        cuda_stream = self.transport.runtime.cuda.Stream(self.device, priority)
        return DeviceStream(name, index, self.transport.split(comm, comm, 0, comm.rank, cuda_stream), cuda_stream)

    def close(self) -> None:
        """End the NCCL communicator. Collective."""
        self.transport.close()


class HostedBackend:
    """Device tensors by MPI.

    kind: "mpi", for an MPI that takes device addresses, or "staged", through pinned host memory. host: the transport
    that moves the data.
    """

    def __init__(self, kind: str, runtime: Runtime, device: torch.device, host: HostTransport) -> None:
        self.kind, self.device = kind, device
        self._runtime = runtime
        inner: Any = (
            StagedTransport(runtime, host, device)
            if kind == "staged"
            else device_address_transport(runtime, host, device)
        )
        self.transport = Hosted(inner, runtime, device)

    def refusal(self, dtype: torch.dtype, op: str) -> None:
        """Return None: the host reduces every dtype."""

    def make_current(self) -> None:
        """Make the device the current one of this thread."""
        self._runtime.cuda.set_device(self.device)

    def over(self, host: HostTransport) -> HostedBackend:
        """Return the same backend over another host transport."""
        return HostedBackend(self.kind, self._runtime, self.device, host)

    def close(self) -> None:
        """Do nothing: the owner of the host transport closes it."""


Backend = NcclBackend | HostedBackend


def open_backend(
    comm: MPI.Intracomm,
    host: HostTransport,
    device: DeviceLike,
    transport: str,
    cuda_aware_mpi: bool | None,
    *,
    cuda: Any = torch.cuda,
    load: Callable[[], Runtime] = load_runtime,
) -> tuple[Backend | None, str | None]:
    """Return the backend for device tensors between the ranks of ``comm``, or None and why there is none. Collective.

    host: the transport for host tensors. device, transport, cuda_aware_mpi: see `Communicator`. Both results are None
    if the CPU was asked for, or if ``device`` is None and no rank has a CUDA device. If ``device`` is None and some
    rank cannot use the device that it has, the second result says why, on every rank. Raises CollectiveError on every
    rank when a rank cannot have what is asked for.
    """
    if stays_on_host(comm, device, cuda):
        return None, None
    try:
        return _open(comm, host, device, transport, cuda_aware_mpi, cuda, load), None
    except CollectiveError as error:  # on every rank
        if device is not None:
            raise
        return None, str(error)


def _open(
    comm: MPI.Intracomm, host: HostTransport, device: DeviceLike, transport: str, cuda_aware_mpi: bool | None,
    cuda: Any, load: Callable[[], Runtime],
) -> Backend:  # fmt: skip
    chosen, runtime = choose_device(comm, device, transport, cuda=cuda, load=load)
    if runtime.nccl is not None:
        return NcclBackend(DeviceTransport.open(runtime, comm, chosen))
    made, problem = None, None
    if transport == "mpi" and not (mpi_takes_device_addresses() if cuda_aware_mpi is None else cuda_aware_mpi):
        problem = (
            "transport='mpi': this MPI does not say that it takes device addresses (MPIX_Query_cuda_support). "
            "cuda_aware_mpi=True overrides this; transport='staged' works with any MPI"
        )
    mpi = load_mpi()
    if problem is None and mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        problem = (
            f"transport={'mpi' if transport == 'mpi' else 'staged'!r}: autograd calls the collectives of a device's "
            "backward pass from a thread of its own, and MPI was started without MPI.THREAD_SERIALIZED or more: start "
            "it with that, or use transport='nccl' or device='cpu'"
        )
    raise_together(comm, problem)
    try:
        made = HostedBackend("mpi" if transport == "mpi" else "staged", runtime, chosen, host)
    except RuntimeError as error:  # the device has no memory left, or is another process's alone
        problem = f"device={str(chosen)!r}: {error}"
    raise_together(comm, problem)
    assert made is not None
    return made
