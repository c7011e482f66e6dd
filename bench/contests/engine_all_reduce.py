"""All-reduces of a device tensor through a Communicator: our contestant of ``python -m bench.gpu overhead``.

mpiexec -n N python -m bench.contests.engine_all_reduce --bytes N --calls N
"""

from __future__ import annotations

import torch

from bench.contests.all_reduce_options import parser
from bench.contests.serving import serve
from commengine import Communicator, launch


def main(world: Communicator) -> None:
    """Set up, then do as the driver says."""
    arguments = parser("bench.contests.engine_all_reduce", __doc__).parse_args()
    tensor = torch.ones(arguments.bytes // 4, device=world.device)

    def step() -> float:
        for _ in range(arguments.calls):
            world.all_reduce(tensor, "avg")
        torch.cuda.synchronize(world.device)
        return 0.0

    step()
    serve(step, world.rank)


if __name__ == "__main__":
    launch.run(main, device="cuda")
