"""Seconds per training step of `DataParallel` and of torch's DistributedDataParallel over gloo.

    python -m bench.contest data_parallel --output data_parallel.md --json data_parallel.json
    python -m bench.contest data_parallel --width 16 --global-batch-size 32     # one network only

The network is ResNet-20 (He et al. 2016, section 4.2) of two widths, with 0.3 and 10 million parameters. All
contestants have two processes of one thread, and the same weights and images. They must report the same losses. Each
rank's batch norms see this rank's images, and the running statistics become those of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench.contest.parts.base import add_fields, task_of
from bench.contest.parts.programs import GivenTask, ProgramContest
from bench.programs.driver import Contestant
from bench.programs.image_task import ImageTask, build
from trainers.options import COUNT, between

#: the widths that are measured, and the steps of a round: the paper's, and one with 36 times as many parameters
WIDTHS = {16: 10, 96: 2}


class DataParallelContest(ProgramContest):
    """A module on two replicas."""

    title = "A module on two replicas"
    items = "images"
    steps = 0

    def contestants(self, file: str, given: Any) -> list[Contestant]:
        """Ours, ours with overlap, and torch's."""
        ours = "bench.programs.image_task"
        return [
            Contestant.of("ours", 2, ours, file, mpi=True),
            Contestant.of("ours-overlap", 2, ours, file, "overlap", mpi=True),
            Contestant.of("ddp", 2, "bench.peers.residual_ddp", file),
        ]

    def add_options(self, add: Callable[..., Any]) -> None:
        """The sizes of the network."""
        super().add_options(add)
        add("--steps", type=int, valid=COUNT, help="of each contestant in a round (default: 10, or 2 of the wide one)")
        add("--width", type=int, valid=COUNT, help="measure one network of this width only")
        add_fields(add, ImageTask, pixels=between(4, 4096), global_batch_size=COUNT)

    def check(self, given: Any) -> None:
        """The batch is that of two ranks."""
        super().check(given)
        if given.global_batch_size % 2:
            raise ValueError(f"--global-batch-size {given.global_batch_size}: must be a multiple of 2")

    def tasks(self, given: Any) -> Iterator[GivenTask]:
        """Yield a task for each width."""
        for width, steps in WIDTHS.items() if given.width is None else [(given.width, 10)]:
            task = task_of(ImageTask, given, width=width)
            parameters = sum(parameter.numel() for parameter in build(task).parameters())
            labels = {"width": width, "million parameters": parameters / 1e6}
            yield GivenTask(labels, task, given.global_batch_size, given.steps or steps)


CONTEST = DataParallelContest()
