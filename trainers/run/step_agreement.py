"""The ranks tell each other, after each step, what they must do together: one all-reduce of a few integers.

A rank cannot act alone on a signal, on its clock or on an error of a background thread, because the other ranks would
wait for it in the next collective.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from commengine import Communicator, UsageError
from commengine.rank_zero import broadcast_text


class StepAgreement:
    """Flags whose largest value over the ranks of ``world`` every rank learns in each `exchange`.

    Every rank must add the same flags in the same order. An exchange costs a few microseconds more than the
    all-reduce.
    """

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self._failures: list[Callable[[], str | None]] = []
        self._flags: dict[str, Callable[[], int]] = {}
        self._values = np.zeros(1, np.int64)  # of failures, then of the flags
        self._tensor = torch.from_numpy(self._values)  # the same memory; writing into an array takes less time

    def add(self, name: str, poll: Callable[[], int]) -> None:
        """Add a flag. poll: called in each exchange; returns this rank's value, an integer of at least 0."""
        if name in self._flags:
            raise ValueError(f"the flag {name!r} is there already")
        self._flags[name] = poll
        self._values = np.zeros(1 + len(self._flags), np.int64)
        self._tensor = torch.from_numpy(self._values)

    def add_failure(self, poll: Callable[[], str | None]) -> None:
        """Add a source of errors. poll: called in each exchange; returns what went wrong on this rank, or None.

        Other ranks need not add the same source.
        """
        self._failures.append(poll)

    def exchange(self) -> dict[str, int]:
        """Return each flag's largest value over the ranks. Collective over the world.

        Raises UsageError, on all ranks, if a rank reports a failure: with the words of the first such rank.
        """
        problem = next((told for poll in self._failures if (told := poll()) is not None), None)
        size = self._world.size
        failed = 0 if problem is None else size - self._world.rank
        self._values[:] = [failed, *(poll() for poll in self._flags.values())]
        if size > 1:
            self._world.all_reduce(self._tensor, "max")
        failed, *largest = self._values.tolist()
        if failed:
            raise UsageError(broadcast_text(self._world, problem or "", size - failed))
        return dict(zip(self._flags, largest, strict=True))
