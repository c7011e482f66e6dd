"""All-reduces of a device tensor through a Communicator: our contestant of ``python -m bench.gpu overhead``.

mpiexec -n N python -m bench.contests.engine_all_reduce --bytes N --calls N --way plain|traced|watched|stream
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from bench.contests.all_reduce_options import WAYS, parser
from bench.contests.serving import serve
from commengine import Communicator, launch, trace

TIMEOUT_S = 600.0  # of the way "watched": far longer than a step


def main(world: Communicator) -> None:
    """Set up, then do as the driver says."""
    options = parser("bench.contests.engine_all_reduce", __doc__)
    options.add_argument("--way", choices=WAYS, default="plain", help="how a call runs (default: %(default)s)")
    given = options.parse_args()
    timeout = TIMEOUT_S if given.way == "watched" else None
    with contextlib.ExitStack() as stack:
        comm = stack.enter_context(Communicator(world.mpi, timeout=timeout, device=given.device))
        log = stack.enter_context(trace(comm)) if given.way == "traced" else None
        stream: Any = comm.new_stream() if given.way == "stream" else None
        tensor = torch.ones(max(1, given.bytes // 4), device=comm.device)

        def step() -> float:
            for _ in range(given.calls):
                work = comm.all_reduce(tensor, "avg", stream=stream)
            work.wait()
            if comm.device.type == "cuda":
                torch.cuda.synchronize(comm.device)
            if log is not None:
                log.settle()  # a training run does so after each step
            return 0.0

        step()
        serve(step, comm.rank)


if __name__ == "__main__":
    launch.run(main, device="cpu")
