"""The transports of bench/transports/in_process.py as ranks of a job of another MPI.

mpiexec -n 2 python -m bench.peers.calls.another_mpi TRANSPORT CAPACITY     # with $BENCH_PEER_SOCKET, see obeying.py
"""

from __future__ import annotations

import sys

from bench.peers.calls.obeying import serve
from bench.transports.in_process import LOCAL
from commengine import CollectiveError, Communicator, launch


def main(world: Communicator) -> None:
    """Serve one transport."""
    name, capacity = sys.argv[1], int(sys.argv[2])
    serve(lambda: LOCAL[name](world, capacity), (CollectiveError, ValueError), world.rank)


if __name__ == "__main__":
    launch.run(main)
