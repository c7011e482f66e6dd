"""A rank of the emulated cluster: the real schedule of a program, with an emulated device and an emulated network.

The program runs under `EmulatedDevice`, which adds up its seconds. The transports of the engine's communicators and
streams are replaced: a collective moves no data, and returns when the network process has said at which time it is
through. A stream's collectives run on its own thread, so the program's overlap is the cluster's.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

from bench.emulator.device import EmulatedDevice
from bench.emulator.schedules import MESSAGE
from commengine import Communicator
from commengine.calls.thread_stream import ThreadStream
from commengine.operations.operation import Operation, Run
from commengine.stream import Gate, Stream


class Actor:
    """A thread of a rank. time: of the cluster, until which its work is done. pending: a stream's items."""

    def __init__(self, index: int) -> None:
        self.index, self.time, self.pending = index, 0.0, 0
        self.answers: SimpleQueue[float | None] = SimpleQueue()


class EmulatedRank:
    """The device, the time and the connection of one rank. path: of the network process's socket.

    computed: the seconds that the device has computed.
    """

    def __init__(self, rank: int, device: EmulatedDevice, path: str) -> None:
        self.rank, self.device, self.computed = rank, device, 0.0
        self._actors = [Actor(0)]
        self._streams: dict[Stream, Actor] = {}
        self._here = threading.local()
        self._here.actor = self._actors[0]
        self._lock = threading.RLock()  # for the connection, and for what an actor's state and its message say together
        self._awaited: dict[Gate, list[Actor]] = {}
        self._reached: dict[Gate, float] = {}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
            connected.connect(path)
            self._connection = Connection(connected.detach())
        self._connection.send({"rank": rank})
        threading.Thread(target=self._listen, name="emulated network", daemon=True).start()

    def now(self) -> float:
        """The cluster's time, in seconds since its start, for the calling thread."""
        actor: Actor = self._here.actor
        if actor.index == 0:
            actor.time += self.device.seconds
            self.computed += self.device.seconds
            self.device.seconds = 0.0
        return actor.time

    def collective(self, **about: Any) -> None:
        """Run a collective of this thread, as the arguments of `Network.join` describe it."""
        actor: Actor = self._here.actor
        self._tell(actor.index, self.now(), **about)
        answer = actor.answers.get()
        if answer is None:
            raise ConnectionError("the emulated network has ended")
        actor.time = answer

    def close(self) -> None:
        """Leave the cluster."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)  # the listening thread ends
        self._connection.close()

    @contextmanager
    def emulating(self, world: Communicator) -> Iterator[None]:
        """Emulate the device, and let streams and waits for them keep the cluster's time. Collective over ``world``.

        All ranks begin at the same time. Outside the block a rank takes no time, and may wait for others as it likes.
        """
        main = self._actors[0]
        main.time = max(world.mpi.allgather(self.now()))
        self._tell(0, main.time)
        world.mpi.Barrier()  # no rank goes on before the hub can know that all of them run
        put, block, opening = ThreadStream._put, Gate.synchronize, Gate.open
        try:
            with (
                patch.object(ThreadStream, "_put", lambda stream, call, event: self._enqueue(put, stream, call, event)),
                patch.object(Gate, "synchronize", lambda gate: self._wait(gate, block)),
                patch.object(Gate, "open", lambda gate: self._finish(gate, opening)),
                self.device,
            ):
                yield
        finally:
            self._tell(0, None)

    def _enqueue(self, put: Any, stream: Stream, call: Callable[[], None], event: Any) -> None:
        """Put work into a stream. From now on the stream has something to do, whenever its thread begins it."""
        if not stream.threaded:
            put(stream, call, event)
            return
        moment = self.now()
        with self._lock:
            actor = self._streams.get(stream)
            if actor is None:
                actor = self._streams[stream] = Actor(len(self._actors))
                self._actors.append(actor)
            if not actor.pending:
                self._tell(actor.index, moment)
            actor.pending += 1

        def timed() -> None:
            self._here.actor = actor
            actor.time = max(actor.time, moment)
            call()

        put(stream, timed, event)

    def _wait(self, gate: Gate, block: Callable[[Gate], None]) -> None:
        actor: Actor = self._here.actor
        self.now()
        with self._lock:
            if gate not in self._reached and not gate.query():
                self._awaited.setdefault(gate, []).append(actor)
                self._tell(actor.index, None)
        block(gate)
        actor.time = max(actor.time, self._reached.get(gate, 0.0))

    def _finish(self, gate: Gate, opening: Callable[[Gate], None]) -> None:
        """A stream has come to the end of an item: who waits for it runs, and a stream without items waits."""
        actor: Actor = getattr(self._here, "actor", self._actors[0])
        if actor.index:
            with self._lock:
                self._reached[gate] = actor.time
                for waiting in self._awaited.pop(gate, ()):
                    self._tell(waiting.index, max(waiting.time, actor.time))
                actor.pending -= 1
                if not actor.pending:
                    self._tell(actor.index, None)
        opening(gate)

    def _tell(self, actor: int, time: float | None, **about: Any) -> None:
        with self._lock:
            self._connection.send({"actor": actor, "time": time, **about})

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                actor, time = self._connection.recv()
                self._actors[actor].answers.put(time)
        for one in self._actors:
            one.answers.put(None)


class EmulatedTransport:
    """The transport of one sequence of collectives. members: the group's ranks in the world. key: of the sequence."""

    def __init__(self, rank: EmulatedRank, members: list[int], key: str) -> None:
        self._rank, self._members, self._key = rank, members, key
        self._numbers: defaultdict[Any, Iterator[int]] = defaultdict(itertools.count)

    def prepared(self, operation: Operation, args: tuple[Any, ...]) -> Run:
        """Return what runs calls of the form of ``args``."""
        return lambda *given: self.run(operation, given)

    def run(self, operation: Operation, args: tuple[Any, ...]) -> None:
        """Run a call: on the emulated network, which moves no data.

        Raises ValueError for a sendrecv that is no hop around the ring of the group.
        """
        about = dict(zip(operation.arguments, args, strict=True))
        counted = about[operation.counted].nbytes if operation.counted else 0
        members, name = self._members, operation.name
        if name in ("send", "recv"):  # another sequence for each direction of a pair
            peer = members[about["dst" if name == "send" else "src"]]
            members, name = [self._rank.rank, peer][:: 1 if name == "send" else -1], MESSAGE
        if name == "sendrecv":
            here, size = members.index(self._rank.rank), len(members)
            if (about["dst"], about["src"]) != ((here + 1) % size, (here - 1) % size):
                raise ValueError("the emulator runs a sendrecv from the rank before to the next one only")
        self._rank.collective(
            group=(self._key, *members), number=next(self._numbers[name, *members]), members=members,
            operation=name, nbytes=operation.nbytes(counted, len(self._members)),
        )  # fmt: skip

    def close(self) -> None:
        """Nothing is held."""


@contextmanager
def emulated(rank: EmulatedRank, *comms: Communicator) -> Iterator[None]:
    """Put communicators, and the streams that they have now, onto the emulated network. Collective over each."""
    with ExitStack() as stack:
        for comm in comms:
            members = comm.mpi.allgather(rank.rank)
            places = [(comm._calls, "host", 0), *((stream, "transport", stream.index) for stream in comm._streams)]
            for place, name, index in places:
                stack.callback(setattr, place, name, getattr(place, name))
                setattr(place, name, EmulatedTransport(rank, members, f"{comm.name} {index}"))
        yield
