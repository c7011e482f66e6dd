"""A training step on the emulated cluster: the real trainer on ranks whose device and links are emulated."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from bench.emulator.device import EmulatedDevice
from bench.emulator.machine import EmulatedMachine
from bench.emulator.rank import EmulatedRank, emulated
from bench.step_study.recorder import open_trainer
from commengine import Communicator, UsageError
from trainers.tasks.gpt import GPTTrainConfig


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


def run_steps(world: Communicator, rank: EmulatedRank, config: GPTTrainConfig, warmup: int, steps: int) -> list[float]:
    """Train on the emulated cluster: the seconds of each step on its slowest rank. Collective over ``world``."""
    with rank.device:  # a model that takes no memory
        trainer = open_trainer(config, world)
    grid = trainer.grid
    groups = {id(one): one for one in (grid.world, grid.tensor, grid.data)}.values()
    moments = []
    with emulated(rank, *groups), rank.emulating(world):
        for _ in range(warmup + steps):
            grid.world.barrier()
            began = rank.now()
            trainer.step()
            moments.append(rank.now() - began)
    every = world.mpi.allgather(moments[warmup:])
    trainer.close()
    return [max(times) for times in zip(*every, strict=True)]
