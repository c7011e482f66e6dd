"""The first part of a Communicator's constructor: the ranks compare its arguments and duplicate the caller's group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from commengine.agreement import agree
from commengine.device.choice import TRANSPORTS, DeviceLike, parse_device
from commengine.dtypes import ORDERS
from commengine.errors import CollectiveError, TransferError
from commengine.host.operands import checked_limit
from commengine.host.polling import PollingCalls
from commengine.host.switch_points import SwitchPoints, agreed, checked_digest
from commengine.mpi import load_mpi, making_communicators
from commengine.timeout.arrival import Arrival
from commengine.timeout.watcher import Watch, check_timeout

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Opened:
    """What the ranks have made and agreed on: the duplicate, the watcher if there is a timeout, table and limit."""

    comm: Any
    watch: Watch | None
    points: SwitchPoints
    operand_bytes: int


class _Caller(NamedTuple):
    rank: int
    size: int
    name: str


def open_group(mpi_comm: MPI.Intracomm, name: str, timeout: float | None, given: dict[str, Any]) -> Opened:
    """Duplicate ``mpi_comm``, once more for a watcher if there is a timeout. Collective over it.

    given: the other arguments of `Communicator`, by their names. The timeout counts from this call's first moment.
    Raises CollectiveError on every rank if an argument is wrong on one rank, and CollectiveMismatch if the ranks gave
    different ones. It raises CollectiveError on this rank alone if it has no MPI communicator, or MPI does not run.
    """
    mpi = load_mpi()
    if not mpi.Is_initialized() or mpi.Is_finalized():
        raise CollectiveError("MPI is not running: a Communicator needs MPI initialised and not yet finalised")
    if not isinstance(mpi_comm, mpi.Comm) or mpi_comm == mpi.COMM_NULL or mpi_comm.Is_inter():
        raise CollectiveError(f"Communicator needs an MPI intracommunicator, not {mpi_comm!r}")
    accepted: dict[str, Any] = {}
    words, problem = ["Communicator"], None
    for argument, value in {"name": name, "timeout": timeout, **given}.items():
        try:
            accepted[argument] = _CHECKS.get(argument, repr)(value)
            words.append(f"{argument}={accepted[argument]}")
        except CollectiveError as error:
            problem = problem or str(error)
        except Exception as error:  # of any type that the argument's own class raises: the other ranks must hear of it
            problem = problem or f"{argument}: {type(error).__name__}: {error}"
    limit: float | None = accepted.get("timeout")
    calls = PollingCalls(mpi_comm, Arrival(mpi_comm, "Communicator", name, limit).look)
    agree(_Caller(mpi_comm.rank, mpi_comm.size, name), calls, "\n".join(words), problem)
    points = agreed(calls, mpi_comm.rank, given["switch_points"])
    made: list[Any] = []
    try:
        with making_communicators():
            if limit is None:
                made.append(mpi_comm.Dup())
            else:
                made.append(_duplicate(mpi_comm, calls))
                made.append(_duplicate(mpi_comm, calls))
    except (mpi.Exception, TransferError) as error:
        for comm in made:
            comm.Free()
        raise CollectiveError(f"Communicator {name!r}: {error}") from error
    return Opened(made[0], None if limit is None else Watch(made[1], limit), points, accepted["operand_bytes"])


def _duplicate(comm: MPI.Intracomm, calls: PollingCalls) -> Any:
    """`MPI_Comm_dup` in a form that can be polled."""
    made, request = comm.Idup()
    try:
        calls.wait(request.Test)
    except load_mpi().Exception:  # on every rank; MPICH says why only where the call blocks
        return comm.Dup()
    return made


def _check_order(order: Any) -> Any:
    if order is not None and order not in ORDERS:
        raise CollectiveError(f"order={order!r} is neither None nor one of {', '.join(ORDERS)}")
    return order


def _check_transport(transport: Any) -> Any:
    if transport not in TRANSPORTS:
        raise CollectiveError(f"transport={transport!r} is not one of {', '.join(TRANSPORTS)}")
    return transport


def _type_of(device: DeviceLike) -> str | None:
    return None if device is None else parse_device(device).type  # the ranks may have different devices


#: for each argument that can be wrong: checks it, and returns what must be equal on all ranks
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "timeout": check_timeout,
    "device": _type_of,
    "order": _check_order,
    "transport": _check_transport,
    "switch_points": checked_digest,
    "operand_bytes": checked_limit,
}
