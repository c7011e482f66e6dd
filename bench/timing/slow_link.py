"""A slow link on a fast machine: every operation on host tensors takes as long as it would at a given rate.

The delay is a sleep where the collective runs (for a stream in its worker thread). The core is free to compute
meanwhile, as it is while a network carries a message.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from commengine import Communicator, cost
from commengine.operations.operation import Operation, Run


class SlowLink:
    """Routes whose operations last at least as long as the bytes that a rank sends take at ``rate`` bytes per second.

    Of its largest tensor a rank sends the share that the bus bandwidth counts (`commengine.cost.bus_factor`): all of it
    in a message and in an all-reduce of two ranks, half of it in an all-to-all, all-gather or reduce-scatter of two.
    ranks: of the group.
    """

    def __init__(self, routes: Any, rate: float, ranks: int = 2) -> None:
        self._routes, self._rate, self._ranks = routes, rate, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._routes, name)

    def prepared(self, operation: Operation, args: tuple[Any, ...]) -> Run:
        """Return what runs a call, and then waits."""
        run = self._routes.prepared(operation, args)
        if operation.pairwise:
            size = float(sum(one.tensor.nbytes for one in operation.touched(args) if one.read))
        else:
            size = max((float(argument.nbytes) for argument in args if isinstance(argument, Tensor)), default=0.0)
            size *= cost.bus_factor(operation.name, self._ranks) if operation.name in cost.OPERATIONS else 1

        def slow(*args: Any) -> None:
            start = time.perf_counter()
            run(*args)
            time.sleep(max(0.0, start + size / self._rate - time.perf_counter()))

        return slow

    def run(self, operation: Operation, args: tuple[Any, ...]) -> None:
        """Run a call."""
        self.prepared(operation, args)(*args)


def slow_down(comm: Communicator, rate: float) -> None:
    """Put ``comm``, and the streams that it has now, behind a link of ``rate`` bytes per second.

    For studies and tests only.
    """
    calls: Any = comm._calls
    calls.host = SlowLink(calls.host, rate, comm.size)
    calls._known = None  # every call asks the slow routes
    calls._choose_path()
    for stream in comm._streams:
        stream.transport = SlowLink(stream.transport, rate, comm.size)
