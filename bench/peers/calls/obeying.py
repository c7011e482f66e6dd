"""The peer's end of bench/transports/peer_process.py: obey lines of JSON until the other end goes away.

The connection is the Unix-domain socket that $BENCH_PEER_SOCKET names; a rank that is one of a job's appends its number
to it. Commands are the methods of `Commands`: bind, reset, run, wrong. Each gets one answer, a line of JSON; a command
that fails is answered with {"error": ...}.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any

from bench.transports.environments import SOCKET
from bench.transports.in_process import Bound, LocalTransport
from bench.transports.operations import DTYPES, CollectiveCall


class Commands:
    """The commands, which a transport of this process carries out: a call for each form, by place and buffers."""

    def __init__(self, transport: LocalTransport) -> None:
        self._transport = transport
        self._bound: dict[tuple[bool, str], Bound] = {}

    def bind(
        self, in_place: bool, buffers: str, dtype: str, clock: dict[str, float] | None, **about: Any
    ) -> dict[str, Any]:
        """Make a call ready by making it once, so that an operation that the library does not have fails now.

        clock: of `bench.timing.starting.Clock`, for calls that begin at agreed times; None: at the peer's barrier.
        """
        call, self._transport.buffers = CollectiveCall(dtype=DTYPES[dtype], **about), buffers
        if (reason := self._transport.refuses(call, in_place)) is not None:
            raise ValueError(reason)
        if clock is not None:
            self._transport.agree(clock)
        self._bound[in_place, buffers] = self._transport.bind(call, in_place)
        self._bound[in_place, buffers].run(1)
        return self.reset(in_place, buffers)

    def reset(self, in_place: bool, buffers: str) -> dict[str, Any]:
        """Poison the buffers and write the input."""
        self._current = self._bound[in_place, buffers]
        self._current.reset()
        return {}

    def run(self, in_place: bool, buffers: str, count: int) -> dict[str, Any]:
        """Make ``count`` calls, each after a meeting of the ranks."""
        starts, seconds = self._bound[in_place, buffers].run(count)
        return {"starts": starts.tolist(), "seconds": seconds.tolist()}

    def wrong(self) -> dict[str, Any]:
        """The number of wrong elements of this rank's output of the call that was reset last."""
        return {"wrong": self._current.wrong()}


def serve(make: Callable[[], LocalTransport], errors: tuple[type[Exception], ...], rank: int = 0) -> None:
    """Make the transport, say that it is ready, and obey until the connection ends.

    errors: ValueError, and those of its library: the peer cannot do what it was asked for, or a rank is gone. Any other
    error ends the process. rank: of this process, if it is one of a job's.
    """
    path = os.environ[SOCKET]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(f"{path}{rank}" if path.endswith("/") else path)

        def answer(work: Callable[..., dict[str, Any]], **arguments: Any) -> None:
            try:
                found = work(**arguments)
            except errors as error:
                found = {"error": (str(error).strip() or repr(error)).split("\n")[0]}
            connection.sendall(json.dumps(found).encode() + b"\n")

        commands: list[Commands] = []

        def ready() -> dict[str, Any]:
            commands.append(Commands(make()))
            return {}

        answer(ready)
        with connection.makefile("r", encoding="utf-8") as lines:
            for line in lines if commands else ():
                told = json.loads(line)
                answer(getattr(commands[0], told.pop("do")), **told)
