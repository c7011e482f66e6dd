"""A slow link on a fast machine: every operation on host tensors takes as long as it would at a given rate.

The delay is a sleep where the collective runs (for a stream in its worker thread). The core is free to compute
meanwhile, as it is while a network carries a message.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from commengine import Communicator
from commengine.operations.operation import Operation, Run


class SlowLink:
    """Routes whose operations last at least as long as their bytes take at ``rate`` bytes per second.

    An operation counts its largest tensor: with two ranks this is what an all-reduce sends and receives.
    """

    def __init__(self, routes: Any, rate: float) -> None:
        self._routes, self._rate = routes, rate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._routes, name)

    def prepared(self, operation: Operation, args: tuple[Any, ...]) -> Run:
        """Return what runs a call, and then waits."""
        run = self._routes.prepared(operation, args)
        size = max((argument.nbytes for argument in args if isinstance(argument, Tensor)), default=0)

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
    comm._calls.host = SlowLink(comm._calls.host, rate)
    for stream in comm._streams:
        stream.transport = SlowLink(stream.transport, rate)
