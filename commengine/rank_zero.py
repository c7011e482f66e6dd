"""Work that rank 0 does for all ranks, or that every rank does: the result or the error reaches every rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from .communicator import Communicator
from .errors import UsageError, one_line
from .mpi import load_mpi, reduced

T = TypeVar("T")


def broadcast_json(world: Communicator, value: Any, root: int = 0) -> Any:
    """Return the ``value`` of rank ``root``, which must be representable in JSON, on every rank. Collective.

    A rank that waits for the others, which may come hours later, sleeps between two looks.
    """
    with world._making("broadcast_json") as comm:
        return json.loads(comm.bcast(json.dumps(value) if world.rank == root else None, root))


def gather_json(world: Communicator, value: Any) -> list[Any]:
    """Return every rank's ``value``, which must be representable in JSON, in rank order on rank 0. Collective.

    The other ranks get an empty list.
    """
    with world._making("gather_json") as comm:
        return [json.loads(one) for one in comm.gather(json.dumps(value), 0) or ()]


def on_rank_zero(world: Communicator, work: Callable[[], Any]) -> Any:
    """Run ``work()`` on rank 0, and return its result, which must be representable in JSON, on all ranks. Collective.

    If rank 0 raises `UsageError`, ValueError or OSError, every rank raises `UsageError` with the same message. A
    SystemExit on rank 0 (after --help) ends all ranks with its code.
    """
    outcome: dict[str, Any] = {}
    if world.rank == 0:
        try:
            outcome = {"result": work()}
        except (UsageError, ValueError, OSError) as error:
            outcome = {"error": one_line(error)}
        except SystemExit as stop:
            outcome = {"exit": stop.code if isinstance(stop.code, int) else 0}
    outcome = broadcast_json(world, outcome)
    if "error" in outcome:
        raise UsageError(outcome["error"])
    if "exit" in outcome:
        sys.exit(outcome["exit"])
    return outcome["result"]


def on_every_rank(world: Communicator, work: Callable[[], T]) -> T:
    """Run ``work()`` on every rank, and return this rank's result. Collective.

    If it raises `UsageError`, ValueError or OSError on any rank, all ranks raise `UsageError` with the message of the
    first rank that failed. ``work`` must not communicate. A rank that is done leaves its core to the others.
    """
    problem = ""
    try:
        result = work()
    except (UsageError, ValueError, OSError) as error:
        problem = one_line(error) or repr(error)
    with world._making("on_every_rank") as comm:
        first = reduced(comm, world.rank if problem else world.size, load_mpi().MIN)
        told = comm.bcast(problem, first) if first < world.size else ""
    if told:
        raise UsageError(told)
    return result
