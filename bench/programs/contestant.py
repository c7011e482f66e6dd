"""Run one rank of a contestant: a module of this folder, or of bench/peers, does a task as the driver says.

    mpiexec -n 2 python -m bench.programs.contestant MODULE TASK [WAY]
    RANK=0 WORLD_SIZE=1 python -m bench.programs.contestant MODULE TASK [WAY]

TASK is a JSON file, and WAY says how the module does the task, if there are several ways. The module has ``contestant(
task, way)``, a context manager that gives the step, which returns a loss, and a note about it. A module that runs on
MPI has ``contestant_on(world, task, way)`` instead. The driver (bench/programs/driver.py) names its socket.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from bench.programs.serving import serve


def main() -> None:
    """Set up, then do as the driver says."""
    name, file, way = (*sys.argv[1:], "")[:3]
    module, task = importlib.import_module(name), json.loads(Path(file).read_text())
    if hasattr(module, "contestant"):
        with module.contestant(task, way) as (step, note):
            serve(step, note=note)
        return
    from commengine import Communicator, launch  # other environments do not have it

    def on_rank(world: Communicator) -> None:
        with module.contestant_on(world, task, way) as (step, note):
            serve(step, world.rank, note)

    launch.run(on_rank, device="cpu")


if __name__ == "__main__":
    main()
