"""Random collectives against the exact results: ``mpiexec -n 3 python -m tests.fuzz --calls 30000 --state FILE``.

Everything is drawn from the seed: operations, dtypes, sizes around all switch points, offsets in bytes, memory
(private, windows), forms in place, blocks, streams, orders, checked and watched communicators, inference
mode, autocast, tensors that want gradients, NumPy arrays, and calls that must be refused on every rank. Each tensor,
the bytes beside it and every input are compared. With ``--state`` the command goes on where it stopped. Under MPICH,
``MPIR_CVAR_NUM_CLIQUES=2`` emulates two nodes. The exit status is 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from commengine import Communicator
from tests.support.exact import ALWAYS, NEVER
from tests.support.fuzz.cases import Calls
from tests.support.fuzz.drawing import Memory

if TYPE_CHECKING:
    from mpi4py import MPI

#: cases of one communicator, and seconds after which a rank that waits prints its stacks and ends
EPOCH, STUCK_S = 60, 100


def epoch(mpi: MPI.Intracomm, seed: int, number: int, aligned: bool) -> tuple[int, list[str]]:
    """Run the cases of one communicator. Returns how many calls, and what was wrong on this rank."""
    draw, mine = random.Random(f"{seed} {number}"), random.Random(f"{seed} {number} {mpi.rank}")
    how: dict[str, Any] = {
        "order": draw.choice((None, None, "rank", "tree")),
        "checked": draw.random() < 0.25,
        "timeout": draw.choice((None, None, 120.0)),
    }
    memory = draw.choice(("", "", "always", "never"))
    points = {"always": ALWAYS, "never": NEVER}.get(memory)
    modes: dict[str, Any] = {
        "": contextlib.nullcontext,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }
    wrong: list[str] = []
    done = 0
    with Communicator(mpi, device="cpu", switch_points=points, **how) as comm:
        calls, lanes = Calls(comm, Memory(comm, aligned), memory == "never"), [comm.new_stream(), comm.new_stream()]
        flying: list[tuple[Any, Any, str]] = []

        def land() -> None:
            for work, call, about in flying:
                if work is not None:
                    work.wait()
                wrong.extend(f"{about}: {said}" for place in call.places if (said := place.problem()))
            flying.clear()

        for case in range(EPOCH):
            kind, lane = draw.random(), draw.choice((None, None, None, *lanes))
            mode = draw.choice(("", "", "inference", "autocast"))
            calls.memory.inference = mode == "inference"
            where = f"{memory} {mode} {'' if lane is None else lane.name}"
            about = f"epoch {number} case {case} {how} {where}"
            try:
                if kind < 0.2 or lane is None or draw.random() < 0.6:
                    land()
                if kind < 0.06:
                    call, lane = calls.refused(draw, mine), None
                elif kind < 0.2:
                    call = calls.block(draw, mine)
                else:  # calls in flight at once must not share a window
                    call = calls.call(draw, mine, 2 * (len(flying) % 2))
                about += f": {call.text}"
                with modes[mode]():
                    flying.append((call.run(lane), call, about))
                if lane is None or kind < 0.2 or len(flying) == 2:  # a block takes places in any window
                    land()
            except Exception as error:
                raise AssertionError(about) from error
            done += max(1, call.text.count(";") + 1)
        land()
    return done, wrong


def main() -> int:
    """Run the command on every rank."""
    from mpi4py import MPI

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--calls", type=int, default=1000, help="end after this many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="or after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epoch", type=int, help="only this one")
    parser.add_argument("--aligned", action="store_true", help="no tensor begins beside a multiple of its dtype's size")
    parser.add_argument("--state", type=Path, help="a file of JSON that knows where the command stopped")
    given = parser.parse_args()
    mpi, began = MPI.COMM_WORLD, time.monotonic()
    key = f"{mpi.size} ranks, seed {given.seed}" + "".join(
        f", {name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("MPIR_CVAR_")
    )
    states: dict[str, list[int]] = {}
    if given.state and given.state.exists():
        states = json.loads(given.state.read_text())
    number, total, bad = mpi.bcast(states.get(key, [0, 0, 0]))
    if given.epoch is not None:
        number = given.epoch
    ending = False
    while not ending:
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        try:
            done, wrong = epoch(mpi, given.seed, number, given.aligned)
        except AssertionError:
            print(f"[rank {mpi.rank}] {traceback.format_exc()}", file=sys.stderr, flush=True)
            time.sleep(1)
            mpi.Abort(1)
        found = mpi.allgather(wrong)
        number, total, bad = number + 1, total + done, bad + sum(map(len, found))
        for rank, texts in enumerate(found if mpi.rank == 0 else ()):
            for text in texts:
                print(f"[rank {rank}] {text}", flush=True)
        late = time.monotonic() - began > given.seconds
        ending = mpi.bcast(total >= given.calls or late or given.epoch is not None)
        if mpi.rank == 0:
            if ending or number % 20 == 0:
                print(f"{key}: {total} calls in {number} groups, {bad} wrong", flush=True)
            if given.state and given.epoch is None:
                given.state.write_text(json.dumps(states | {key: [number, total, bad]}))
    faulthandler.cancel_dump_traceback_later()
    MPI.Finalize()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
