"""Count the bytes that reductions send from a host, by MPI alone and in two levels.

``wire_bytes.py FILE BYTES ROUNDS``. The two alternate.
FILE: {operation: {dtype: {way: {"bytes": sent by rank 0's host in a call, "seconds": the least}}}}.
"""

import json
import sys
import time
from pathlib import Path

import torch

from commengine import Communicator, launch
from tests.support.exact import ALWAYS, NEVER


def sent() -> int:
    """Bytes that left this host so far."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "wan0:" in line)
    return int(line.partition(":")[2].split()[8])


def main(world: Communicator) -> None:
    path, nbytes, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    with (
        Communicator(world.mpi, switch_points=NEVER) as flat,
        Communicator(world.mpi, switch_points=ALWAYS) as levels,
    ):
        ways = {"mpi": flat, "two levels": levels}
        for operation in ("all_reduce", "reduce_scatter"):
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
                tensor = torch.ones(nbytes // dtype.itemsize, dtype=dtype)
                part = tensor[: tensor.numel() // world.size].clone()
                spent: dict[str, list[tuple[int, float]]] = {way: [] for way in ways}
                for _ in range(rounds):
                    for way, comm in ways.items():
                        world.barrier()
                        part.zero_()
                        before = sent()
                        world.barrier()  # no rank of this host has sent anything yet
                        began = time.perf_counter()
                        if operation == "all_reduce":
                            comm.all_reduce(tensor, "max")
                        else:
                            comm.reduce_scatter(part, tensor, "max")
                        world.barrier()
                        spent[way].append((sent() - before, time.perf_counter() - began))
                        assert (tensor if operation == "all_reduce" else part).eq(1).all()
                found.setdefault(operation, {})[name] = {
                    way: {"bytes": min(s for s, _ in pairs), "seconds": min(t for _, t in pairs)}
                    for way, pairs in spent.items()
                }  # fmt: skip
        node_size = levels.node_size
    if world.rank == 0:
        path.write_text(json.dumps({"ranks_on_a_host": node_size, **found}, indent=1))


if __name__ == "__main__":
    launch.run(main)
