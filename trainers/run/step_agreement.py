"""The ranks tell each other, after each step, what they must do together: one all-reduce of a few integers.

A rank cannot act alone on a signal, on its clock or on an error of a background thread, because the other ranks would
wait for it in the next collective.
"""

from __future__ import annotations

import torch

from commengine import Communicator, UsageError
from commengine.rank_zero import broadcast_json


def agree(world: Communicator, problem: str | None, *flags: int) -> list[int]:
    """The largest value of each of ``flags`` over the ranks. Collective over ``world``.

    problem: what went wrong on this rank, or None. flags: integers of at least 0, as many on every rank. Raises
    UsageError, on all ranks, if a rank has a problem: with the words of the first such rank.
    """
    failed = 0 if problem is None else world.size - world.rank
    values = torch.tensor([failed, *flags], dtype=torch.int64, device="cpu")
    if world.size > 1:
        world.all_reduce(values, "max")
    failed, *largest = values.tolist()
    if failed:
        raise UsageError(broadcast_json(world, problem or "", world.size - failed))
    return largest
