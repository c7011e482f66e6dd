"""The transports of peers: each rank has one process of the peer, a child on the same cores.

The other end is the program of the peer (`Peer.program`). While one of the two processes works, the other is blocked in
a read, so they alternate call by call as transports in one process do. Messages are lines of JSON in both directions.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.timing.sampling import Times
from bench.timing.starting import AgreedStart, Clock
from bench.transports.in_process import Bound, Transport
from bench.transports.operations import CollectiveCall
from commengine import CollectiveError, Communicator

ROOT = Path(__file__).resolve().parents[2]
ANSWER_SECONDS = 180.0
#: variables of MPI and its launchers; the child must not get them, because it is no rank of the job
LAUNCHERS = ("PMI_", "PMIX_", "PMI2_", "OMPI_", "PRTE_", "MPI_LOCAL", "MPIR_", "HYDI_", "HYDRA_", "I_MPI_")


@dataclass(frozen=True)
class Peer:
    """A transport whose processes run another program.

    program: the module that obeys lines of JSON, as bench/peers/collectives.py does. library: what the program is told
    to use; for that one, torch.distributed's backend. operations: those that the program runs. on_device: whether it
    needs a CUDA device.
    """

    program: str
    library: str
    operations: tuple[str, ...]
    on_device: bool = False


_DISTRIBUTED = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all", "sendrecv",
    "barrier",
)  # fmt: skip
#: the peers, by their names in --transports
PEERS = {
    "gloo": Peer("bench.peers.collectives", "gloo", _DISTRIBUTED),
    "torch-nccl": Peer("bench.peers.collectives", "nccl", _DISTRIBUTED, on_device=True),
}


class PeerError(Exception):
    """The peer cannot do what it was asked for, or is gone."""


class PeerProcess:
    """One process of the peer."""

    def __init__(self, peer: Peer, rank: int, size: int, address: tuple[str, int], capacity: int) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        path = os.pathsep.join([str(ROOT), *filter(None, [clean.get("PYTHONPATH")])])
        group = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        # CPython starts it by vfork and exec, so no memory of MPI is copied or registered twice.
        self._process = subprocess.Popen(
            [sys.executable, "-m", peer.program, peer.library, str(capacity)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**clean, **group, "PYTHONPATH": path},
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """The next answer. Raises PeerError for an error, for the end of the process, and for silence."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(ANSWER_SECONDS):
                raise PeerError(f"no answer in {ANSWER_SECONDS:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise PeerError(f"its process ended: {' '.join(self._log.read()[-1500:].split())}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise PeerError(found["error"])
        return found

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a command, and wait for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(str(error)) from error
        return self.answer()

    def close(self) -> None:
        """End the process: close its input, then kill it if it does not end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # the end of its commands
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


class PeerCall(Bound):
    """A call that the peer makes."""

    def __init__(self, process: PeerProcess, in_place: bool, clock: Clock | None) -> None:
        self._process, self._in_place = process, in_place
        self._clock = {} if clock is None else {"clock": asdict(clock)}

    def reset(self) -> None:
        self._process.ask(do="reset", in_place=self._in_place)

    def run(self, count: int) -> tuple[Times, Times]:
        answer = self._process.ask(do="run", count=count, in_place=self._in_place, **self._clock)
        # The child reads the same clock of the same machine, so there is no offset between the two.
        return np.array(answer["starts"]), np.array(answer["seconds"])

    def wrong(self) -> int:
        return int(self._process.ask(do="wrong")["wrong"])


class PeerTransport(Transport):
    """A library in one process beside each rank of the group: an entry of `PEERS`."""

    def __init__(self, name: str, group: Communicator, capacity: int) -> None:
        peer = PEERS[name]
        self.name, self.operations = name, peer.operations
        self._group = group
        self.meet = group.mpi.Barrier
        if peer.on_device and not torch.cuda.is_available():
            raise CollectiveError("needs a CUDA device, and torch sees none")
        self._process = PeerProcess(peer, group.rank, group.size, _meeting_point(group), capacity)
        try:
            self._process.answer()
        except PeerError as error:
            self._process.close()
            raise CollectiveError(str(error)) from error

    def bind(self, call: CollectiveCall, in_place: bool) -> Bound:
        about: dict[str, Any] = {
            "operation": call.operation,
            "dtype": str(call.dtype).removeprefix("torch."),
            "redop": call.redop,
        }
        about |= {"root": call.root, "ranks": call.ranks, "count": call.count, "in_place": in_place}
        try:
            self._process.ask(do="bind", **about)
        except PeerError as error:
            raise CollectiveError(str(error)) from error
        return PeerCall(self._process, in_place, self.meet.clock if isinstance(self.meet, AgreedStart) else None)

    def close(self) -> None:
        self._process.close()


def _meeting_point(group: Communicator) -> tuple[str, int]:
    """The address at which the group's first rank listens.

    It is a name that the other ranks can reach, and a port that is free now.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        mine = (socket.gethostname(), int(probe.getsockname()[1]))
        hosts = group.mpi.allgather(mine)
    return ("127.0.0.1", hosts[0][1]) if len({name for name, _ in hosts}) == 1 else hosts[0]
