"""A command on ranks: its settings from a command line, a communicator with those settings, and a training run."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

import torch

from commengine import CollectiveError, Communicator, ProcessGrid, UsageError
from commengine.errors import one_line
from commengine.rank_zero import on_every_rank, on_rank_zero
from trainers.data.blend import blend_of, verify
from trainers.data.corpus import file_remarks
from trainers.settings import derived
from trainers.settings.command import Command
from trainers.settings.commands import TransformerSettings
from trainers.settings.job import JobOptions
from trainers.tokenizing import probe

from .loop import train
from .stopping import StopRequests
from .task import TrainingTask

Settings = TypeVar("Settings", bound=JobOptions)
Pretraining = TypeVar("Pretraining", bound=TransformerSettings)


def run_command(
    world: Communicator, command: Command[Pretraining], new_task: Callable[[Pretraining, Communicator], TrainingTask],
    instead: Callable[[Pretraining, Communicator], bool],
) -> int:  # fmt: skip
    """One rank of the pretraining command ``command``, from its flags to its report: the exit status.

    new_task: as for `trainers.run.loop.train`. instead: called before it, as a collective; if it returns True, that was
    all that the settings ask for, and nothing is trained. Rank 0 reads the flags and the files; an error in them is
    raised on every rank. Collective over ``world``. Afterwards the process ignores the signals that end a run
    (`StopRequests`), so that its status is the returned one.
    """
    with StopRequests(world) as stopping:
        said = list[str]()
        config = job_settings(world, command, said.append)
        said += on_rank_zero(world, lambda: file_remarks(config))
        if derived.order(config) is not None:
            fix_products()
        if config.verify_data:  # before there is a timeout: reading all data may take long
            verify_files(world, lambda part, parts: verify(blend_of(config), part, parts))
        stopping.configure(config)
        with watched(config, world) as comm:
            if instead(config, comm):
                for line in said:
                    tell(line)
                return 0
            return train(config, comm, new_task, stopping, remarks=said)


def tell(line: str) -> None:
    """Print a line for people, on standard error."""
    print(line, file=sys.stderr, flush=True)


def job_settings(world: Communicator, command: Command[Settings], tell: Callable[[str], None] = tell) -> Settings:
    """The valid and complete settings of a command, from this process's flags. tell: as for `Command.read`.

    Collective over ``world``: rank 0 reads the flags and the files. Raises UsageError, on every rank.
    """
    values = on_rank_zero(world, lambda: asdict(command.read(None, world.size, tell)))
    probe.share(world)
    return command.settings(**values)


def grid_of(settings: JobOptions, world: Communicator) -> ProcessGrid:
    """The groups of a job. Collective over ``world``."""
    return ProcessGrid(
        world, tensor=settings.tensor_model_parallel_size, context=derived.context_ranks(settings),
        pipeline=derived.stages(settings), expert=derived.expert_ranks(settings),
    )  # fmt: skip


def verify_files(world: Communicator, read: Callable[[int, int], int]) -> None:
    """Verify files (``--verify-data``), each rank its share. Collective over ``world``.

    read: reads this rank's share, and returns its bytes (`trainers.data.blend.verify`). Raises UsageError, on every
    rank, where a file is damaged.
    """
    began = time.perf_counter()
    verified = torch.tensor([on_every_rank(world, lambda: read(world.rank, world.size))])
    world.all_reduce(verified)
    if world.rank == 0 and (size := int(verified)):
        seconds = time.perf_counter() - began
        print(f"--verify-data: {size:,} bytes verified in {seconds:.1f} s", file=sys.stderr, flush=True)


def watched(config: JobOptions, world: Communicator) -> Communicator:
    """A communicator of the ranks of ``world`` with the settings' timeout, device and transport; the caller closes it.

    The device becomes torch's current device. Without ``--device`` it is the one that the ranks can use, and rank 0
    says in one line why that is not the GPU that torch finds. Collective over ``world``. Raises UsageError, on every
    rank, where any rank cannot have the device that is asked for.
    """
    timeout = 60 * config.distributed_timeout_minutes or None
    order, device = derived.order(config), config.device
    if device is None and order is not None:  # devices have orders of their own
        device = "cpu"
    try:
        made = Communicator(world.mpi, timeout=timeout, device=device, transport=config.device_transport, order=order)
    except CollectiveError as error:
        said = _as_flags(error)
        raise UsageError(said if "--device" in said else f"--device {device}: {said}") from error
    if made.no_device is not None and made.rank == 0:
        print(f"running on the CPU: {one_line(_as_flags(made.no_device))}", file=sys.stderr, flush=True)
    made.make_device_current()
    return made


def _as_flags(problem: object) -> str:
    """A message of the engine with the flags of a command in place of the arguments of a Communicator."""
    flagged = re.sub(r"\bdevice='(\S+?)'", r"--device \1", str(problem))
    return re.sub(r"\btransport='(\S+?)'", r"--device-transport \1", flagged)


def fix_products() -> None:
    """Let MKL's products have the same bits wherever their operands lie, and on any number of threads.

    MKL reads the variable at its first call: call this before the first product. Raises UsageError, as on every rank,
    if the user has asked for the opposite.
    """
    mode = os.environ.setdefault("MKL_CBWR", "AUTO")
    if mode.upper().startswith("OFF"):
        raise UsageError(f"MKL_CBWR={mode}: --deterministic needs products that repeat; unset it, or set AUTO")
