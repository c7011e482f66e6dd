"""The first part of a Communicator's constructor: the ranks compare its arguments and duplicate the caller's group."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from commengine.agreement import agree
from commengine.device.choice import TRANSPORTS, parse_device
from commengine.errors import CollectiveError, TransferError
from commengine.host.polling import PollingCalls
from commengine.host.switch_points import SwitchPoints, agreed, checked_digest
from commengine.host.wire import ORDERS
from commengine.job_end import abort, end_waiting_launcher, is_child_of_rank, say
from commengine.mpi import load_mpi, making_communicators
from commengine.startup.tasks import say_if_alone
from commengine.timeout.watcher import EXIT_CODE, LINGER_SECONDS, UNSEEN_SECONDS, Watch, check_timeout

if TYPE_CHECKING:
    from mpi4py import MPI


#: seconds by which a rank may have come later than the first one that reports, and still report, too
LATER_SECONDS = 10.0


class _Caller(NamedTuple):
    rank: int
    size: int
    name: str


class _Deadline:
    """The timeout of a constructor, which begins before the ranks have a watcher. A rank calls `look` while it waits.

    It sends nothing: a receive of the caller's could take a message on the caller's communicator. So the ranks that
    have come report, and those that do not are missing.
    """

    def __init__(self, name: str, timeout: float | None) -> None:
        self._name, self._timeout = name, timeout
        self._began = self._looked = time.monotonic()

    def look(self) -> None:
        """Print the report and end the job if this rank has run out of time."""
        last, self._looked = self._looked, time.monotonic()
        if self._looked - last > UNSEEN_SECONDS:  # this process was suspended, perhaps the whole job
            self._began += self._looked - last
        waited, limit = self._looked - self._began, self._timeout
        if limit is not None and waited > limit:
            where = f"[rank {load_mpi().COMM_WORLD.rank}] Communicator #1 of group {self._name!r}"
            words = f"is not done after {waited:.1f} s (timeout {limit:g} s)"
            say(f"{where} {words}\nmissing: the ranks that do not report this")
            time.sleep(max(LINGER_SECONDS, min(limit, LATER_SECONDS)))
            end_waiting_launcher()
            abort(EXIT_CODE)


def open_group(
    mpi_comm: MPI.Intracomm, name: str, timeout: float | None, given: dict[str, Any]
) -> tuple[Any, Watch | None, SwitchPoints]:
    """Duplicate ``mpi_comm``, once more for a watcher if there is a timeout. Collective over it.

    given: the other arguments of `Communicator`, by their names. The timeout counts from this call's first moment.
    Returns the duplicate, the watcher if there is a timeout, and the table of switch points.
    Raises CollectiveError on every rank if an argument is wrong on one rank, and CollectiveMismatch if the ranks gave
    different ones. Raises CollectiveError on this rank alone if it has no MPI communicator, MPI does not run, or it is
    a forked child.
    """
    mpi = load_mpi()
    if is_child_of_rank():
        raise CollectiveError("a forked child cannot make a Communicator: the rank of MPI is its parent")
    if not mpi.Is_initialized() or mpi.Is_finalized():
        raise CollectiveError("MPI is not running: a Communicator needs MPI initialised and not yet finalised")
    if not isinstance(mpi_comm, mpi.Comm) or mpi_comm == mpi.COMM_NULL or mpi_comm.Is_inter():
        raise CollectiveError(f"Communicator needs an MPI intracommunicator, not {mpi_comm!r}")
    if mpi_comm != mpi.COMM_SELF:
        say_if_alone(mpi.COMM_WORLD.size, library=mpi.Get_library_version())
    accepted: dict[str, Any] = {}
    problem = None
    for argument, value in {"name": name, "timeout": timeout, **given}.items():
        try:
            accepted[argument] = _accepted(argument, value)
        except CollectiveError as error:
            problem = problem or str(error)
        except Exception as error:  # of any type that the argument's own class raises: the other ranks must hear of it
            problem = problem or f"{argument}: {type(error).__name__}: {error}"
    limit: float | None = accepted.get("timeout")
    calls = PollingCalls(mpi_comm, _Deadline(name, limit).look)
    words = "\n".join(["Communicator", *(f"{argument}={value}" for argument, value in accepted.items())])
    agree(_Caller(mpi_comm.rank, mpi_comm.size, name), calls, words, problem)
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
    return made[0], None if limit is None else Watch(made[1], limit), points


def _duplicate(comm: MPI.Intracomm, calls: PollingCalls) -> Any:
    """`MPI_Comm_dup` in a form that can be polled."""
    made, request = comm.Idup()
    try:
        calls.wait(request.Test)
    except load_mpi().Exception:  # on every rank; MPICH says why only where the call blocks
        return comm.Dup()
    return made


def _accepted(argument: str, value: Any) -> Any:
    """Check an argument of `Communicator`, and return what must be equal on all ranks."""
    if argument in _ALLOWED:
        if value not in _ALLOWED[argument]:
            allowed = ", ".join(map(str, _ALLOWED[argument]))
            raise CollectiveError(f"{argument}={value!r} is not one of {allowed}")
        return value
    if argument == "device":  # the ranks may have different devices
        return None if value is None else parse_device(value).type
    return _CHECKS.get(argument, repr)(value)


_ALLOWED: dict[str, tuple[str | None, ...]] = {"order": (None, *ORDERS), "transport": TRANSPORTS}
_CHECKS: dict[str, Callable[[Any], Any]] = {"timeout": check_timeout, "switch_points": checked_digest}
