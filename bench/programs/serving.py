"""The contestant's end of a contest: every rank obeys the commands of the driver, on a socket of its own.

Between commands a rank blocks in a read on its connection, so a waiting contestant uses no processor time. (If the
ranks waited for rank 0 in a collective, they would spin there.) It needs the standard library only.

The protocol has one line each way; bench/programs/driver.py is the driver:

    rank -> driver   {"rank": 0, "pid": 123, "note": "..."}                     once, after set-up
    driver -> rank   run 2
    rank -> driver   {"seconds": [0.71, 0.70], "loss": [9.01, 9.00], "peak_rss_bytes": 600000000}
                     or {"error": "traceback"}, and the rank exits
    driver -> rank   quit
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

SOCKET = "BENCH_SOCKET"  # environment variable: path of the driver's Unix-domain socket


def timed(step: Callable[[], float], count: int) -> dict[str, Any]:
    """Run ``count`` steps. Returns the time of each step on this rank, the loss of each, and the peak memory."""
    seconds, losses = [], []
    for _ in range(count):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"seconds": seconds, "loss": losses, "peak_rss_bytes": peak}


def serve(step: Callable[[], float], rank: int | None = None, note: str = "") -> None:
    """Run ``step`` whenever the driver asks for it, until the driver quits or is gone.

    step: one whole training step. It returns this rank's loss. The driver averages the losses over the ranks, so a
    data-parallel rank returns the mean over its own samples, and no rank communicates for it. rank: default $RANK.
    note: a remark about this contestant that the driver prints.
    """
    if rank is None:
        rank = int(os.environ.get("RANK", "0"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(os.environ[SOCKET])

        def send(message: dict[str, Any]) -> None:
            connection.sendall(json.dumps(message).encode() + b"\n")

        send({"rank": rank, "pid": os.getpid(), "note": note})
        with connection.makefile("r", encoding="utf-8") as commands:
            while (command := commands.readline().split()) and command[0] != "quit":
                try:
                    answer = timed(step, int(command[1]))
                except BaseException:
                    send({"error": traceback.format_exc()})
                    raise
                send(answer)
