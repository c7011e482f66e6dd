"""An MPI program without torch, of which one rank leaves the others: ``diverges.py KIND RANK STEP``."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

kind, odd, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
comm = MPI.COMM_WORLD
field, large = np.zeros(4), np.zeros(1 << 16)
gathered = np.zeros((comm.size, 1 << 16))


def wander():
    """What the odd rank does in the last step in place of the sum."""
    if kind == "sleep":
        time.sleep(1000)
    elif kind == "loop":
        while True:
            np.sqrt(large)
    elif kind == "one call":
        np.linalg.svd(np.ones((6000, 6000)))
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "read":
        os.read(os.pipe()[0], 1)
    elif kind == "send":
        comm.Send(large, (odd + 1) % comm.size)  # nobody receives it
    elif kind == "barrier":
        comm.Barrier()
    elif kind == "root":
        comm.Gather(large, gathered, root=odd)  # the others gather on the rank before
    elif kind == "fifo":
        os.mkfifo("fifo")
        with Path("fifo").open():  # nobody writes
            pass
    elif kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "left":
        os._exit(0)


def step(number):
    """Exchange and sum."""
    if kind == "slow":
        time.sleep(0.2 * (comm.rank + 1))
    elif kind == "uneven":  # the slowest rank takes 2 s
        end = time.monotonic() + 2 * (comm.rank + number) % comm.size / comm.size
        while time.monotonic() < end:
            np.linalg.inv(large[:10_000].reshape(100, 100) + np.eye(100))
    elif kind == "root" and number == last and comm.rank != odd:
        comm.Gather(large, gathered, root=(odd - 1) % comm.size)
    elif number == last and comm.rank == odd:
        wander()
        return
    comm.Allreduce(MPI.IN_PLACE, field)


for number in range(last + 3):
    step(number)
    comm.Bcast(large, root=0)
print("rank", comm.rank, "is through")
