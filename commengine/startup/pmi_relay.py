"""MPICH across nodes under Slurm's pmi2 plugin: a relay that keeps their lines short enough for Slurm.

Each rank of MPICH talks to Slurm in lines of text (PMI 1) over the socket ``PMI_FD``. To exchange network addresses
between nodes, MPICH 5 sends 4096 bytes in lines of up to 1079 characters, and Slurm's plugin (pmi1.c: "TODO: read until
newline") reads at most 1024. The start then fails inside MPI_Init, with "invalid client request", "failed to unpack
address" or "Message truncated". Zeros are sent in a short form, and most of the 4096 bytes are what lies in memory
behind the address, so it depends on the program and its environment whether a start fails.

Slurm tells MPICH how long a value may be. The relay is a process between the two that makes this number smaller.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, MutableMapping

#: what Slurm says about the longest value, in its answer to get_maxes, and what MPICH is told. A line has up to 80
#: characters besides its value
SAID, TOLD = b"vallen_max=1024", b"vallen_max=0896"
READ_BYTES = 1 << 16


def needs_relay(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of a Slurm step on several nodes, with a socket of Slurm's pmi2 plugin.

    The ranks of one node exchange no addresses by PMI. MPICH's mpiexec, which tells MPI_LOCALNRANKS, reads long lines.
    """
    nodes = environ.get("SLURM_STEP_NUM_NODES", "1")
    by_srun = "PMI_FD" in environ and "MPI_LOCALNRANKS" not in environ
    return by_srun and nodes.isdecimal() and int(nodes) > 1


def start_relay(environ: MutableMapping[str, str] = os.environ) -> subprocess.Popen[bytes] | None:
    """Start the relay if MPI needs one, and set PMI_FD to its socket. Call it before MPI starts, on every rank.

    `commengine.launch.run` does so. A program that starts MPI itself calls this function before it imports mpi4py.MPI.
    The relay ends when this process does, or when MPI has ended; signals to the ranks do not end it. Returns the
    relay's process, or None if there is no need of one. Raises OSError if it cannot be started.
    """
    if not needs_relay(environ):
        return None
    slurm = int(environ["PMI_FD"])
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), str(slurm)],
        pass_fds=(theirs.fileno(), slurm), stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    theirs.close()
    os.close(slurm)  # so that Slurm sees the end of this connection when the relay ends
    os.set_inheritable(ours.fileno(), True)
    environ["PMI_FD"] = str(ours.detach())
    return process


def relay(rank: socket.socket, slurm: socket.socket) -> None:
    """Pass bytes on in both directions until one side ends. The answer to get_maxes comes in one piece."""
    with selectors.DefaultSelector() as selector:
        selector.register(rank, selectors.EVENT_READ, slurm)
        selector.register(slurm, selectors.EVENT_READ, rank)
        while True:
            for key, _ in selector.select():
                source, target = key.fileobj, key.data
                assert isinstance(source, socket.socket)
                data = source.recv(READ_BYTES)
                if not data:
                    return
                target.sendall(data.replace(SAID, TOLD) if source is slurm else data)


if __name__ == "__main__":
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends a job's signals to every process of the step
    rank_end, slurm_end = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    with contextlib.suppress(ConnectionError), rank_end, slurm_end:
        relay(rank_end, slurm_end)
