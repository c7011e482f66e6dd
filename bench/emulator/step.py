"""A training step on the emulated cluster: the real trainer on ranks whose device and links are emulated."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.emulator.device import EmulatedDevice
from bench.emulator.machine import EmulatedMachine
from bench.emulator.rank import EmulatedRank, emulated
from bench.step_study.recorder import open_trainer
from bench.step_study.traced_step import groups_of
from commengine import Communicator, UsageError
from trainers.settings.commands import GPTSettings


@contextmanager
def cluster(world: Communicator, machine: EmulatedMachine, seed: int = 0) -> Iterator[EmulatedRank]:
    """Start the network process, and give this rank its place. Collective over ``world``.

    seed: of the noise of kernels and messages. Raises UsageError if the machine has another number of ranks.
    """
    if machine.ranks != world.size:
        raise UsageError(f"the emulated machine has {machine.ranks} ranks, and the job {world.size}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="emulator-"))) if world.rank == 0 else None
        folder = world.mpi.bcast(folder)
        path = folder / "network"
        if world.rank == 0:
            machine.save(folder / "machine.json")
            argv = [sys.executable, "-m", "bench.emulator.hub", str(folder / "machine.json"), str(path), str(seed)]
            hub = stack.enter_context(subprocess.Popen(argv, stdin=subprocess.DEVNULL))  # it ends after the last rank
            stack.push(partial(_end_after_failure, hub))
            while not path.exists() and hub.poll() is None:
                time.sleep(0.01)
        world.mpi.Barrier()
        yield stack.enter_context(
            closing(EmulatedRank(world.rank, EmulatedDevice(machine, world.rank, seed), str(path)))
        )


def _end_after_failure(hub: subprocess.Popen[bytes], failed: type[BaseException] | None, *_: object) -> None:
    """Other ranks may wait for this one: without the network they fail, too."""
    if failed is not None:
        hub.terminate()


@dataclass(frozen=True)
class EmulatedStep:
    """A step of all ranks. seconds: of the slowest. waits: by rank, the share of the pass in which it does not compute.

    The pass lasts from the first forward to the last backward of all ranks.
    """

    seconds: float
    waits: tuple[float, ...]


def run_steps(
    world: Communicator, rank: EmulatedRank, config: GPTSettings, warmup: int, steps: int
) -> list[EmulatedStep]:
    """Train on the emulated cluster. Collective over ``world``. A pipeline needs streams: overlap_p2p_communication."""
    with rank.device:  # a model that takes no memory
        trainer = open_trainer(config, world)
    groups = {id(one): one for one in (trainer.grid.world, *groups_of(trainer))}.values()
    found: list[tuple[float, float, float, float]] = []
    passes: list[tuple[float, float]] = []  # (moment, seconds computed) before and after the schedule
    run = trainer.schedule.run

    def observed(*args: Any) -> None:
        passes.append((rank.now(), rank.computed))
        run(*args)
        passes.append((rank.now(), rank.computed))

    with patch.object(trainer.schedule, "run", observed), emulated(rank, *groups), rank.emulating(world):
        for _ in range(warmup + steps):
            trainer.grid.world.barrier()
            began = rank.now()
            passes.clear()
            trainer.step()
            (first, before), (last, after) = passes
            found.append((rank.now() - began, first, last, after - before))
    every = world.mpi.allgather(found[warmup:])
    trainer.close()
    return [_together(of_step) for of_step in zip(*every, strict=True)]


def _together(ranks: Sequence[tuple[float, float, float, float]]) -> EmulatedStep:
    """A step of all ranks, from (seconds, begin of the pass, its end, seconds computed in it) of each."""
    whole = max(last for _, _, last, _ in ranks) - min(first for _, first, _, _ in ranks)
    return EmulatedStep(max(step for step, *_ in ranks), tuple(1 - computed / whole for *_, computed in ranks))
