"""A small contestant for the tests of contests: ``contestant.py MODE [SECONDS]``. It starts fast, without torch.

The loss of its n-th step is 8 - n + the rank. MODE says what it does in its third step, or at its start.
"""

import os
import sys
import time

from bench.programs.serving import serve

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


if mode == "dies at the start":
    print("no such data set", file=sys.stderr)
    sys.exit(3)
serve(step, note=mode)
