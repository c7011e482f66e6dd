"""torch.distributed's sums, asked by bench/conformance: one rank of a job that any launcher starts.

mpiexec -n 4 python -m bench.peers.summed BACKEND DTYPE ELEMENTS FOLDER OPERATION...

It needs $MASTER_ADDR and $MASTER_PORT.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from bench.conformance.sums import FLOATS, Sums, ask
from bench.peers.calls.collectives import Distributed
from commengine.startup.tasks import number_of_tasks, task_number


def main() -> None:
    """Write this rank's answers to a file of the folder."""
    backend, dtype, most, folder, *operations = sys.argv[1:]
    rank, ranks = task_number(), (number_of_tasks() or ("", 1))[1]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    transport = Distributed(backend, Sums.capacity(ranks, FLOATS[dtype], int(most)))
    found = ask(transport, rank, ranks, FLOATS[dtype], int(most), operations)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
