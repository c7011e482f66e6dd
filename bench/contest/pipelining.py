"""Seconds per training step on two pipeline stages: ours, and torch.distributed.pipelining over gloo.

    python -m bench.contest pipelining --output pipelining.md --json pipelining.json

Both run 1F1B on the same modules of a GPT (bench/programs/pipeline_task.py), with two processes of one thread. They
must report the same losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench.contest.parts.base import add_fields, task_of
from bench.contest.parts.programs import GivenTask, ProgramContest
from bench.programs.driver import Contestant
from bench.programs.pipeline_task import PipelineTask
from trainers.options import COUNT


class PipeliningContest(ProgramContest):
    """A step on two pipeline stages."""

    title = "A step on two pipeline stages"

    def contestants(self, file: str, given: Any) -> list[Contestant]:
        """Ours, ours with threads, and torch's."""
        ours = "bench.programs.pipelined_step"
        return [
            Contestant.of("ours", 2, ours, file, mpi=True),
            Contestant.of("ours-threads", 2, ours, file, "threads", mpi=True),
            Contestant.of("torch", 2, "bench.peers.pipelining", file),
        ]

    def add_options(self, add: Callable[..., Any]) -> None:
        """The sizes of the model and the step."""
        super().add_options(add)
        add_fields(
            add, PipelineTask, hidden_size=COUNT, num_layers=COUNT, seq_length=COUNT, micro_batch_size=COUNT,
            microbatches=COUNT,
        )  # fmt: skip

    def check(self, given: Any) -> None:
        """Two stages have as many layers."""
        super().check(given)
        if given.num_layers % 2:
            raise ValueError(f"--num-layers {given.num_layers}: must be a multiple of the two stages")

    def tasks(self, given: Any) -> Iterator[GivenTask]:
        """Yield the one task."""
        task = task_of(PipelineTask, given)
        labels = {"hidden": task.hidden_size, "layers": task.num_layers, "micro-batches": task.microbatches}
        yield GivenTask(labels, task, task.microbatches * task.micro_batch_size * task.seq_length)


CONTEST = PipeliningContest()
