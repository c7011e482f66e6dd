"""barrier: no rank goes on before every rank is here."""

from __future__ import annotations

from commengine.device.nccl import NcclWire
from commengine.dtypes import NCCL_REDUCTIONS
from commengine.host.wire import MpiWire
from commengine.stream import Stream, Work

from .checks import Caller
from .operation import Operation, Run


class Barrier(Operation):
    """The row of `barrier`, and its ways."""

    name, arguments, counted = "barrier", (), None

    def by_mpi(self, wire: MpiWire) -> Run:
        run: Run = wire.calls.Barrier
        return run

    def by_nccl(self, wire: NcclWire) -> None:
        """Let later work on the stream start only when every rank's stream has reached this point. The host goes on."""
        data = wire.byte.data_ptr()
        wire.enqueue("allReduce", data, data, 1, *NCCL_REDUCTIONS[wire.byte.dtype, "max"])


BARRIER = Barrier()


class BarrierCall:
    """`barrier`, as programs call it."""

    def barrier(self: Caller, *, stream: Stream | None = None) -> Work:
        """Wait until every rank is here. On a stream, work enqueued later starts when all ranks have reached it.

        Every rank calls it. It has no tensor: without a stream it is a barrier of the hosts, and waits for nothing that
        a device does. It raises the errors that all operations raise (`Communicator`).
        """
        return self._calls.run(BARRIER, (), stream)
