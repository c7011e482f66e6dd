"""A command on ranks: its settings from a command line, a communicator with those settings, and a training run."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from commengine import CollectiveError, Communicator, UsageError
from commengine.errors import one_line
from commengine.rank_zero import on_every_rank, on_rank_zero
from trainers.config import JobConfig, TrainConfig
from trainers.megatron_flags.parsing import parse
from trainers.tokenizing import probe

from .loop import train
from .stopping import StopRequests
from .task import TrainingTask

Config = TypeVar("Config", bound=TrainConfig)
Job = TypeVar("Job", bound=JobConfig)


def run_command(
    world: Communicator, command: str, kind: type[Config], new_task: Callable[[Config, Communicator], TrainingTask],
    instead: Callable[[Config, Communicator], bool] = lambda *_: False,
) -> int:  # fmt: skip
    """One rank of the training command ``command``, from its flags to its report: the exit status.

    kind: of the settings. new_task: as for `trainers.run.loop.train`. instead: called before it, as a collective; if it
    returns True, that was all that the settings ask for, and nothing is trained. Rank 0 reads the flags and the files;
    an error in them is raised on every rank. Collective over ``world``. Afterwards the process ignores the signals that
    end a run (`StopRequests`), so that its status is the returned one.
    """
    with StopRequests(world) as stopping:
        said = list[str]()
        config = job_config(world, kind, command, said.append)
        said += on_rank_zero(world, config.remarks)
        if config.order is not None:
            fix_products()
        verify_files(world, config.verify_files)  # before there is a timeout: reading all data may take long
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


def job_config(world: Communicator, kind: type[Job], command: str, tell: Callable[[str], None] = tell) -> Job:
    """The valid and complete settings of ``command``, of type ``kind``, from this process's flags.

    tell: as for `read_config`. Collective over ``world``: rank 0 reads the flags and the files. Raises UsageError, on
    every rank.
    """
    config = kind(**on_rank_zero(world, lambda: read_config(kind, None, command, world.size, tell).to_json()))
    probe.share(world)
    return config


def read_config(
    kind: type[Job], argv: Sequence[str] | None, command: str, ranks: int, tell: Callable[[str], None] = tell
) -> Job:
    """The valid and complete settings, of type ``kind``, of a job of ``ranks`` ranks. It reads files, on rank 0 only.

    argv: the arguments of ``command``; None for those of this process. tell: called, where all is valid, with what
    `parse` says of Megatron-LM's flags and defaults. Raises UsageError or ValueError, naming the option.
    """
    said = list[str]()
    config = parse(kind, argv, command, said.append)
    config.validate(ranks)
    config = config.completed(ranks)
    for line in said:
        tell(line)
    return config


def verify_files(world: Communicator, read: Callable[[int, int], int]) -> None:
    """Verify files (``--verify-data``), each rank its share. Collective over ``world``.

    read: reads this rank's share, and returns its bytes: `TrainConfig.verify_files`. Raises UsageError, on every rank,
    where a file is damaged.
    """
    began = time.perf_counter()
    verified = torch.tensor([on_every_rank(world, lambda: read(world.rank, world.size))])
    world.all_reduce(verified)
    if world.rank == 0 and (size := int(verified)):
        seconds = time.perf_counter() - began
        print(f"--verify-data: {size:,} bytes verified in {seconds:.1f} s", file=sys.stderr, flush=True)


def watched(config: JobConfig, world: Communicator) -> Communicator:
    """A communicator of the ranks of ``world`` with the settings' timeout, device and transport; the caller closes it.

    The device becomes torch's current device. Without ``--device`` it is the one that the ranks can use, and rank 0
    says in one line why that is not the GPU that torch finds. Collective over ``world``. Raises UsageError, on every
    rank, where any rank cannot have the device that is asked for.
    """
    timeout = 60 * config.distributed_timeout_minutes or None
    device = "cpu" if config.device is None and config.order is not None else config.device  # devices have own orders
    try:
        made = Communicator(
            world.mpi, timeout=timeout, device=device, transport=config.device_transport, order=config.order
        )
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
