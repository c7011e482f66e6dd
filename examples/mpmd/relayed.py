"""Start any MPI program with the relay that MPICH needs under ``srun --mpi=pmi2`` on several nodes.

    srun --mpi=pmi2 -N 2 -n 4 python examples/mpmd/relayed.py ./solver ARGUMENTS

The relay (commengine/startup/pmi_relay.py) starts only where MPICH needs it; then this process becomes the program.
"""

import os
import sys

from commengine.startup.pmi_relay import start_relay

if len(sys.argv) < 2:
    raise SystemExit("which program? python examples/mpmd/relayed.py PROGRAM ARGUMENTS")
start_relay()
os.execvp(sys.argv[1], sys.argv[1:])
