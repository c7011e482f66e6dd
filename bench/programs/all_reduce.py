"""All-reduces of a device tensor through a Communicator: our contestant of ``python -m bench.gpu overhead``.

The task is {"bytes": of the fp32 tensor, "calls": of a step, "device": "cuda" or "cpu"}.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from commengine import Communicator, trace

#: how the engine runs a call: alone, in a trace, with a timeout, or on a stream of its own
WAYS = ("plain", "traced", "watched", "stream")
TIMEOUT_S = 600.0  # of the way "watched": far longer than a step


@contextlib.contextmanager
def contestant_on(world: Communicator, task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """The step in one of WAYS. Collective over ``world``."""
    timeout = TIMEOUT_S if way == "watched" else None
    with contextlib.ExitStack() as stack:
        comm = stack.enter_context(Communicator(world.mpi, timeout=timeout, device=task["device"]))
        log = stack.enter_context(trace(comm)) if way == "traced" else None
        stream: Any = comm.new_stream() if way == "stream" else None
        tensor = torch.ones(max(1, task["bytes"] // 4), device=comm.device)

        def step() -> float:
            for _ in range(task["calls"]):
                work = comm.all_reduce(tensor, "avg", stream=stream)
            work.wait()
            if comm.device.type == "cuda":
                torch.cuda.synchronize(comm.device)
            if log is not None:
                log.settle()  # a training run does so after each step
            return 0.0

        step()
        yield step, ""
