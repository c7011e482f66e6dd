"""A private /dev/shm of a few megabytes, as containers have it. Needs root, and a container that may mount."""

import subprocess
from collections.abc import Sequence

#: a program of any number of ranks with MPI's own calls and without the engine; its messages are large, too, because
#: Intel's MPI takes its memory when they pass
BARE = """
from array import array
from mpi4py import MPI
world = MPI.COMM_WORLD
for size in (8, 1 << 16, 1 << 22):
    ours, sums = array("b", bytes(size)), array("b", bytes(size))
    world.Allreduce(ours, sums)
    world.Bcast(ours)
    world.Sendrecv(ours, (world.rank + 1) % world.size, 0, sums, (world.rank - 1) % world.size, 0)
"""


def in_small_shm(megabytes: int, command: str) -> list[str]:
    """The command line that runs ``command``, of a shell, where /dev/shm has that many times 2^20 bytes."""
    return ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm && {command}"]


def allowed(words: Sequence[str]) -> str:
    """Why ``unshare`` refuses these words; empty if it does not."""
    done = subprocess.run(["unshare", *words], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"


def why_not() -> str:
    """Why /dev/shm cannot be mounted here; empty if it can."""
    return allowed(in_small_shm(1, "true")[1:])
