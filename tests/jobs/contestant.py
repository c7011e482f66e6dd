"""A small contestant for the tests of contests: ``contestant.py MODE [SECONDS]``. It starts fast, without torch.

The loss of its n-th step is 8 - n + the rank. MODE says what it does in its third step, or instead of its greeting.
"""

import json
import os
import socket
import sys
import time

from bench.contests.serving import SOCKET, serve

mode, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
rank = int(os.environ["RANK"])
steps = 0


def step() -> float:
    """Sleep, then return the loss or do what the mode says."""
    global steps
    steps += 1
    time.sleep(seconds)
    if steps == 3 and rank == 1:
        if mode == "dies":
            os._exit(7)
        if mode == "raises":
            raise ArithmeticError("the third step failed")
        if mode == "hangs":
            time.sleep(3600)
    return float("nan") if mode == "diverges" and steps == 3 else 8.0 - steps + rank


def answer(lines: list[str]) -> None:
    """Speak to the driver by hand: one line for the greeting, one for each command."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(os.environ[SOCKET])
        with connection.makefile("rw", encoding="utf-8") as both:
            for line in lines:
                both.write(line + "\n")
                both.flush()
                both.readline()


if mode == "dies at the start":
    print("no such data set", file=sys.stderr)
    sys.exit(3)
greeting = json.dumps({"rank": rank, "pid": os.getpid(), "note": ""})
nonsense = {
    "greets with nonsense": ["hello"],
    "greets as another rank": [json.dumps({"rank": 0, "pid": os.getpid()})],
    "answers nonsense": [greeting, "well done"],
    "answers without times": [greeting, json.dumps({"loss": [1.0]})],
    "answers too few steps": [greeting, json.dumps({"seconds": [0.1], "loss": [1.0], "peak_rss_bytes": 1})],
}
if mode in nonsense:
    answer(nonsense[mode])
else:
    serve(step, note=mode)
