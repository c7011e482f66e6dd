"""The transports of peers: each rank has one process of the peer, on the same cores.

The other end is the program of the peer (`Peer.program`), which runs in the environment of the peer. While one of the
two processes works, the other is blocked in a read, so they alternate call by call as transports in one process do.
Messages are lines of JSON in both directions, on a Unix-domain socket (bench/peers/calls/obeying.py). A peer is a child
of its rank, or a rank of a job of its own: a second MPI cannot be in a process that has a first, and its launcher gives
standard input to its own rank 0 alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from bench.timing.sampling import Times
from bench.timing.starting import AgreedStart, spans_nodes
from bench.transports.environments import ROOT, SOCKET, end, environment_of, launcher
from bench.transports.in_process import Bound, Transport
from bench.transports.operations import OPERATIONS, CollectiveCall
from commengine import CollectiveError, Communicator, UsageError

ANSWER_SECONDS = 180.0
#: between two looks of a job's first rank at its launcher while the ranks connect
LOOK_SECONDS = 0.5
#: variables of MPI and its launchers; the peer must not get them, because it is no rank of the job
LAUNCHERS = ("PMI_", "PMIX_", "PMI2_", "OMPI_", "PRTE_", "MPI_LOCAL", "MPIR_", "HYDI_", "HYDRA_", "I_MPI_")


@dataclass(frozen=True)
class Peer:
    """A transport whose processes run another program.

    program: the module that obeys lines of JSON (bench/peers/calls). library: what the program is told to use; for
    bench.peers.calls.collectives, torch.distributed's backend. operations: those that the program runs. on_device:
    whether it needs a CUDA device. environment: the one of `bench.transports.environments` that the program runs in;
    empty: this process's. job: the processes are ranks of an MPI job, which the environment's launcher starts.
    one_node: it works inside a node only.
    """

    program: str
    library: str
    operations: tuple[str, ...]
    on_device: bool = False
    environment: str = ""
    job: bool = False
    one_node: bool = False


_ONECCL = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "sendrecv", "barrier")


#: the peers, by their names in --transports. A name with @ is the engine's transport over that MPI.
PEERS = {
    "gloo": Peer("bench.peers.calls.collectives", "gloo", OPERATIONS),
    "torch-nccl": Peer("bench.peers.calls.collectives", "nccl", OPERATIONS, on_device=True),
    **{
        mpi if way == "mpi4py" else f"{way}@{mpi}": Peer(
            "bench.peers.calls.another_mpi", way, OPERATIONS, environment=mpi, job=True, one_node=True
        )
        for mpi in ("openmpi", "intel")
        for way in ("mpi4py", "engine", "shared")
    },
    "oneccl": Peer("bench.peers.calls.compiled", "oneccl", _ONECCL, environment="oneccl", job=True, one_node=True),
    "deepspeed": Peer(
        "bench.peers.calls.deepspeed_shm", "shm", ("all_reduce",), environment="deepspeed", one_node=True
    ),
    "c-loop": Peer("bench.peers.calls.compiled", "c_loop", OPERATIONS[: OPERATIONS.index("send")], one_node=True),
}


class PeerError(CollectiveError):
    """The peer cannot do what it was asked for, or is gone."""


class PeerTransport(Transport):
    """A library in one process beside each rank of the group: an entry of `PEERS`.

    Raises PeerError, possibly on one rank only.
    """

    def __init__(self, name: str, group: Communicator, capacity: int) -> None:
        self.name, self._peer = name, PEERS[name]
        self.operations, self.meet = self._peer.operations, group.mpi.Barrier
        if self._peer.on_device and not torch.cuda.is_available():
            raise PeerError("needs a CUDA device, and torch sees none")
        if self._peer.one_node and spans_nodes(group.mpi):
            raise PeerError("runs inside a node only")
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.ExitStack() as opened:  # closed here if this fails
            self._log = opened.enter_context(tempfile.TemporaryFile("w+"))
            folder = ""
            if group.rank == 0 or not self._peer.one_node:
                folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="bench-peer-"))
            if self._peer.one_node:
                folder = group.mpi.bcast(folder)
            opened.callback(self._end)
            self._connection = opened.enter_context(self._connect(group, folder, capacity))
            self._connection.settimeout(ANSWER_SECONDS)
            self._lines = opened.enter_context(self._connection.makefile("r", encoding="utf-8"))
            self._answer()
            self._opened = opened.pop_all()

    def _connect(self, group: Communicator, folder: str, capacity: int) -> socket.socket:
        """Start the process, and wait until those of all ranks have connected.

        One that cannot be started, or ends before, is an error of all ranks.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(f"{folder}/{group.rank}")
            listening.listen(1)
            listening.settimeout(LOOK_SECONDS)
            address = _meeting_point(group)  # after it, all ranks listen
            problem = ""
            if group.rank == 0 or not self._peer.job:
                try:
                    self._start(group, folder, address, capacity)
                except (OSError, UsageError) as error:
                    problem = str(error)
            deadline = time.monotonic() + ANSWER_SECONDS
            found: socket.socket | None = None
            while True:
                states = group.mpi.allgather((found is not None, problem))
                if problems := [problem for _, problem in states if problem]:
                    if found is not None:
                        found.close()
                    raise PeerError(problems[0])
                if found is not None and all(connected for connected, _ in states):
                    return found
                if found is None:
                    with contextlib.suppress(TimeoutError):
                        found = listening.accept()[0]
                if found is None and self._process is not None and self._process.poll() is not None:
                    problem = self._last_words()
                elif found is None and time.monotonic() > deadline:
                    problem = f"its process did not connect in {ANSWER_SECONDS:g} s"

    def _start(self, group: Communicator, folder: str, address: tuple[str, int], capacity: int) -> None:
        peer = self._peer
        python, variables = environment_of(peer.environment) if peer.environment else (sys.executable, {})
        clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)} | variables
        clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [clean.get("PYTHONPATH")])])
        # A rank has one core; threads that spin for a second one halt the other.
        clean.setdefault("OMP_NUM_THREADS", "1")
        argv = [python, "-m", peer.program, peer.library, str(capacity)]
        if peer.job:
            argv = [*launcher(python, group.size), *argv]
            clean[SOCKET] = f"{folder}/"
        else:
            clean |= {"RANK": str(group.rank), "WORLD_SIZE": str(group.size), "LOCAL_SIZE": str(group.size)}
            clean |= {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1]), SOCKET: f"{folder}/{group.rank}"}
        # CPython starts it by vfork and exec, so no memory of MPI is copied or registered twice.
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=clean)

    def _last_words(self) -> str:
        self._log.seek(0)
        return f"its process ended: {' '.join(self._log.read()[-1500:].split())}"

    def _answer(self) -> dict[str, Any]:
        """The next answer. Raises PeerError for an error, for the end of the process, and for silence."""
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise PeerError(f"no answer in {ANSWER_SECONDS:g} s") from None
        except OSError as error:
            raise PeerError(str(error)) from error
        if not line:
            raise PeerError(self._last_words())
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise PeerError(found["error"])
        return found

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a command, and wait for its answer."""
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise PeerError(str(error)) from error
        return self._answer()

    def bind(self, call: CollectiveCall, in_place: bool) -> Bound:
        meet = None if self._peer.one_node else self.meet
        about = asdict(call) | {"dtype": str(call.dtype).removeprefix("torch.")}
        form = {"in_place": in_place, "buffers": self.buffers}
        self.ask(do="bind", clock=asdict(meet.clock) if isinstance(meet, AgreedStart) else None, **about, **form)
        return PeerCall(self.ask, form)

    def close(self) -> None:
        """End the process: close the connection, which is the end of its commands, then kill it if it does not end."""
        self._opened.close()

    def _end(self) -> None:
        if self._process is not None:
            end(self._process, self._process.send_signal, 10.0)


class PeerCall(Bound):
    """A call that the peer makes. ask: sends it a command. form: which of the calls that are bound there."""

    def __init__(self, ask: Callable[..., dict[str, Any]], form: dict[str, Any]) -> None:
        self._ask, self._form = ask, form

    def reset(self) -> None:
        self._ask(do="reset", **self._form)

    def run(self, count: int) -> tuple[Times, Times]:
        answer = self._ask(do="run", count=count, **self._form)
        # The child reads the same clock of the same machine, so there is no offset between the two.
        return np.array(answer["starts"]), np.array(answer["seconds"])

    def wrong(self) -> int:
        return int(self._ask(do="wrong")["wrong"])


def _meeting_point(group: Communicator) -> tuple[str, int]:
    """The address at which the group's first rank listens.

    It is a name that the other ranks can reach, and a port that is free now.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        mine = (socket.gethostname(), int(probe.getsockname()[1]))
        hosts = group.mpi.allgather(mine)
    return ("127.0.0.1", hosts[0][1]) if len({name for name, _ in hosts}) == 1 else hosts[0]
