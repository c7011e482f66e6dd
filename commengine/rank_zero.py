"""Work that rank 0 does for all ranks, or that every rank does: the result or the error reaches every rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .communicator import Communicator
from .errors import UsageError, one_line
from .mpi import sleep_until_all

T = TypeVar("T")

#: seconds between two looks of a rank that waits for rank 0
_LOOK_SECONDS = 1e-3


def broadcast_json(world: Communicator, value: Any) -> Any:
    """Return rank 0's ``value``, which must be representable in JSON, on every rank. Collective."""
    encoded = json.dumps(value).encode() if world.rank == 0 else b""
    return json.loads(_broadcast_bytes(world, encoded, 0))


def wait_for_json(world: Communicator, value: Any) -> Any:
    """Do the same as `broadcast_json` where rank 0 may come hours after the others. Collective.

    A rank that waits for rank 0 sleeps between two looks, and leaves its core to others. world: a communicator without
    a timeout.
    """
    sleep_until_all(world.mpi, _LOOK_SECONDS)
    return broadcast_json(world, value)


def _broadcast_bytes(world: Communicator, mine: bytes, root: int) -> bytes:
    length = torch.tensor([len(mine)], dtype=torch.int64, device="cpu")
    world.broadcast(length, root)
    data = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
    if world.rank == root and mine:
        data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    world.broadcast(data, root)
    return bytes(data.numpy())


def gather_json(world: Communicator, value: Any) -> list[Any]:
    """Return every rank's ``value``, which must be representable in JSON, in rank order on rank 0. Collective.

    The other ranks get an empty list.
    """
    mine = json.dumps(value).encode()
    lengths = torch.empty(world.size, dtype=torch.int64, device="cpu")
    world.all_gather(lengths, torch.tensor([len(mine)], dtype=torch.int64, device="cpu"))
    longest = int(lengths.max())
    padded = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
    everybody = None
    if world.rank == 0:
        everybody = torch.empty((world.size, longest), dtype=torch.uint8, device="cpu")
    world.gather(everybody, padded[None])
    if everybody is None:
        return []
    return [json.loads(bytes(row[:length].numpy())) for row, length in zip(everybody, lengths.tolist(), strict=True)]


def broadcast_text(world: Communicator, text: str, root: int) -> str:
    """Return ``text`` of the rank ``root`` on every rank. Collective."""
    return _broadcast_bytes(world, text.encode(), root).decode()


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
    world.wait_for_all()
    ranks = torch.tensor([world.rank if problem else world.size], dtype=torch.int64, device="cpu")
    world.all_reduce(ranks, "min")
    first = int(ranks)
    if first < world.size:
        raise UsageError(broadcast_text(world, problem, first))
    return result
