"""Records what the ranks of a job do with their flags: ``mpiexec -n 2 python -m tests.proof.recording OUTPUT RUNS``.

The code that runs is the engine's own. Only the views of the memory are others, which note each access, and the lock
of the fences.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from commengine import CollectiveError, Communicator
from commengine.host.switch_points import KINDS, OPERATIONS, Key, Point, SwitchPoints
from commengine.operations.uneven import all_to_all_v
from commengine.operations.uneven.all_gather_v import AllGatherV
from commengine.operations.uneven.all_to_all_v import AllToAllV
from commengine.shared_memory import slots as slots_module
from commengine.shared_memory.flags import Flags
from commengine.shared_memory.slots import Slots

from . import programs
from .mutations import mutate
from .programs import Call, Program

WRITES, READS, FENCES, FILLS, TAKES = range(1, 6)
SLOT_BYTES, SLOT_MOST, WIDTH = 4096, 1024, 64
FLOATS = SLOT_BYTES // 4


class Words:
    """A rank's words, whose reads and writes are noted."""

    def __init__(self, owner: int, words: memoryview, notes: list[tuple[int, ...]]) -> None:
        self._owner, self._words, self._notes = owner, words, notes

    def __getitem__(self, at: Any) -> Any:
        value = self._words[at]
        if not isinstance(at, slice):  # a slice is of the text of an error
            self._notes.append((READS, self._owner, at, value))
        return value

    def __setitem__(self, at: int, value: int) -> None:
        self._notes.append((WRITES, self._owner, at, value))
        self._words[at] = value

    def __len__(self) -> int:
        return len(self._words)


class WaitedInVainError(CollectiveError):
    """A rank of mutated code waited for what nobody writes."""


def record(notes: list[tuple[int, ...]], patience: float) -> contextlib.ExitStack:
    """Note in ``notes`` all that flags and slots do which are made in this context.

    patience: seconds after which a wait ends in an error.
    """
    made, ran = Flags.__init__, Slots.run

    def make(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        rank, release = self.rank, self._release
        self._flags = [Words(owner, words, notes) for owner, words in enumerate(self._flags)]
        self._mine = self._flags[rank]
        self._others = [words for words in self._flags if words is not self._mine]

        def noted() -> None:
            notes.append((FENCES, rank, 0, 0))
            release()

        def wait(done: Any) -> None:
            end = time.monotonic() + patience
            while not done():
                os.sched_yield()
                if time.monotonic() > end:
                    raise WaitedInVainError

        self._release, self._wait = noted, wait

    def run(self: Any, *args: Any) -> None:
        *before, fill, take = args

        def filling(chunk: int, slot: int) -> None:
            notes.append((FILLS, self.rank, slot, 0))
            fill(chunk, slot)

        def taking(chunk: int, slot: int) -> None:
            notes.append((TAKES, self.rank, slot, 0))
            take(chunk, slot)

        ran(self, *before, filling, taking)

    Flags.__init__, Slots.run = make, run  # type: ignore[method-assign]
    stack = contextlib.ExitStack()
    stack.callback(lambda: (setattr(Flags, "__init__", made), setattr(Slots, "run", ran)))
    return stack


def perform(world: Communicator, call: Call, shared: torch.Tensor) -> None:
    """Make one call. shared: a tensor in a window, which is large enough."""
    size, code, flat = world.size, call.code, shared.view(-1)
    chunks = (code - programs.SLOTS[0]) % 3 + 1
    if code == programs.COMPARED or code in programs.TWICE:
        step = FLOATS // size // 64 * 64
        world.all_reduce(torch.ones(step * size * chunks if code in programs.TWICE else 8 * size))
    elif code in programs.SLOTS:
        world.all_gather(torch.empty(FLOATS * chunks * size), torch.ones(FLOATS * chunks))
    elif code in programs.ROOTS:
        world.broadcast(torch.ones(FLOATS * chunks), (code - programs.ROOTS[0]) // 3)
    elif code == 1:
        world.all_reduce(flat[: 8 * size])
    elif code == 2:
        world.reduce_scatter(torch.empty(8), flat[: 8 * size])
    elif code == 3:
        world.all_gather(torch.empty(8 * size), flat[:8])
    elif code == 4:
        world.all_gather(flat[: 8 * size], torch.ones(8))
    elif code in (5, 6):
        world.broadcast(flat[: 8 * size], code - 5)
    else:
        _uneven(world, call, shared)


def _uneven(world: Communicator, call: Call, shared: torch.Tensor) -> None:
    rank = world.rank
    more = [int(call.unfit == rank and peer != rank) for peer in range(world.size)]
    gather = call.code == programs.ALL_GATHER_V
    given = [call.rows[rank][rank]] if gather else call.rows[rank]
    input = shared[: sum(given)] if call.places[rank] == programs.WINDOW else torch.ones(sum(given), WIDTH)
    come = [call.rows[peer][peer if gather else rank] + extra for peer, extra in enumerate(more)]
    output = torch.empty(sum(come), WIDTH)
    if gather:
        world.all_gather_v(output, input, come)
    else:
        world.all_to_all_v(output, input, come, given)


def points_of(program: Program) -> SwitchPoints:
    """All goes through memory; or only what lies in windows, and the rest is compared and goes by MPI."""
    bounce = {"bounce": 1} if program.slots else {}
    return SwitchPoints({Key(name, kind, 2): Point(window=1, **bounce) for name in OPERATIONS for kind in KINDS})


def recorded(comm: MPI.Intracomm, program: Program, patience: float) -> list[list[Any]]:
    """Run a program, and return this rank's events of each call, as they were noted."""
    notes: list[tuple[int, ...]] = []
    events: list[list[Any]] = []
    with record(notes, patience), Communicator(comm, switch_points=points_of(program)) as world:
        shared = world.empty((64, WIDTH))
        for call in program.calls:
            notes.clear()
            try:
                perform(world, call, shared)
                going_on = True
            except CollectiveError as error:
                going_on = not isinstance(error.__cause__ or error, WaitedInVainError)
            events.append(list(notes))
            if not going_on:
                break
        world.close()
    return events + [[]] * (len(program.calls) - len(events))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("runs", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutation")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    slots_module.SLOT_BYTES, all_to_all_v.SLOT_MOST = SLOT_BYTES, SLOT_MOST
    if args.mutation:
        mutate(args.mutation)
        # A rank that reads a wrong place would wait in a call of MPI, alone, for ever.
        AllToAllV.by_mpi = AllGatherV.by_mpi = lambda *_: lambda *_: None  # type: ignore[assignment]
    runs: list[Any] = []
    for number in range(args.runs):
        program = programs.drawn(args.seed, number, comm.size)
        if args.mutation and not program.slots:  # as well
            runs.append(None)
        else:
            runs.append(comm.gather(recorded(comm, program, 2 if args.mutation else 60)))
    if comm.rank == 0:
        args.output.write_text(json.dumps({"ranks": comm.size, "seed": args.seed, "runs": runs}))


if __name__ == "__main__":
    main()
