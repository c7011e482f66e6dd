"""The process that carries the messages of all emulated ranks, and keeps their time.

    python -m bench.emulator.hub MACHINE SOCKET SEED

Nothing sleeps: the cluster's time is a number. An actor is a thread of a rank: 0 is its main thread, the others are its
streams. An actor says when it begins a collective, and waits until the hub says when it is through. An event of the
network happens as soon as every actor either waits or has gone beyond its time, because nothing can come before it
any more (conservative simulation: Chandy and Misra 1979). So the times do not depend on this machine, and a second run
finds the same ones.

Each rank connects once, and what is said are dictionaries: {"rank"} first; then {"actor", "time"}: an actor runs from
that time on, or None while it waits for another one of its rank; and a collective: the arguments of `Network.join`.
The answer is (actor, time). The process ends when the last rank has ended, or if no rank says anything for PATIENCE
seconds.
"""

from __future__ import annotations

import math
import socket
import sys
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from bench.emulator.machine import EmulatedMachine
from bench.emulator.network import Network

#: seconds without a word in which a rank that runs must have failed, or waits for what the cluster does not emulate
PATIENCE = 900.0


class Hub:
    """The network, and for each actor the time before which it does nothing: infinite while it waits."""

    def __init__(self, machine: EmulatedMachine, seed: int) -> None:
        self._network = Network(machine, seed)
        self._bounds: dict[tuple[int, int], float] = {(rank, 0): 0.0 for rank in range(machine.ranks)}
        self._ranks: dict[Connection, int] = {}

    def serve(self, listening: socket.socket) -> None:
        """Carry messages until all ranks have ended. Raises TimeoutError."""
        while self._bounds:
            ready = wait([listening, *self._ranks], PATIENCE)
            if not ready:
                runs = sorted({rank for (rank, _), bound in self._bounds.items() if bound < math.inf})
                raise TimeoutError(f"no word for {PATIENCE:g} s; ranks that run: {', '.join(map(str, runs))}")
            for one in ready:
                if isinstance(one, Connection):
                    self._hear(one)
                else:
                    connection = Connection(listening.accept()[0].detach())
                    self._ranks[connection] = connection.recv()["rank"]
            # A rank that speaks may have waited in MPI for one that spoke before it: hear all before anything happens.
            if not wait([listening, *self._ranks], 0):
                self._go_on()

    def _hear(self, connection: Connection) -> None:
        rank = self._ranks[connection]
        try:
            said = connection.recv()
        except (EOFError, ConnectionError):  # it has ended, or was killed
            del self._ranks[connection]
            self._bounds = {key: bound for key, bound in self._bounds.items() if key[0] != rank}
            return
        actor, time = said.pop("actor"), said.pop("time")
        self._bounds[rank, actor] = math.inf if said or time is None else time
        if said:
            done = partial(self._answer, connection, actor)
            self._network.join(rank=rank, actor=actor, time=time, done=done, **said)

    def _answer(self, connection: Connection, actor: int, rank: int, time: float) -> None:
        self._bounds[rank, actor] = time
        connection.send((actor, time))

    def _go_on(self) -> None:
        """Let everything happen that nothing can precede. An answer makes its actor run, and so ends this."""
        while (moment := self._network.next_event()) is not None and moment < min(self._bounds.values(), default=0.0):
            self._network.run(moment)


def main() -> None:
    """Serve."""
    machine, path, seed = sys.argv[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(f"{path}.new")
        listening.listen(1024)
        Path(f"{path}.new").rename(path)  # from now on ranks may connect
        Hub(EmulatedMachine.load(Path(machine)), int(seed)).serve(listening)


if __name__ == "__main__":
    main()
