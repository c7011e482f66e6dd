"""The step of `trainers.training.trainer.Trainer` on stages, as a contestant of ``bench.contest pipelining``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch

from bench.programs.pipeline_task import PipelineTask
from commengine import Communicator, ProcessGrid
from trainers.tasks.gpt import GPTTrainConfig, NextToken, TokenMicrobatch
from trainers.training.trainer import Trainer


class PipelineBatches:
    """The micro-batches of a `PipelineTask`, the same at every step."""

    unusable = "a token of the task lies outside its vocabulary"

    def __init__(self, task: PipelineTask) -> None:
        rows, micro = task.tokens(), task.micro_batch_size
        self.size = len(rows)
        self._batches = [
            TokenMicrobatch(
                part[:, :-1].contiguous(), part[:, 1:].contiguous(), tuple(range(micro * n, micro * n + micro)),
                task.vocab_size,
            )
            for n, part in enumerate(torch.split(rows, micro))
        ]  # fmt: skip

    def __call__(self, k: int) -> Sequence[TokenMicrobatch]:
        """All micro-batches: there is one replica."""
        return self._batches


@contextmanager
def contestant_on(world: Communicator, task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """The step of a `PipelineTask`. way: "threads" for messages on threads."""
    given = PipelineTask(**task)
    config = GPTTrainConfig(
        lr=given.lr, min_lr=0.0, lr_decay_style="constant", mock_data=True, micro_batch_size=given.micro_batch_size,
        overlap_p2p_communication=way == "threads",
    )  # fmt: skip
    grid = ProcessGrid(world, pipeline=world.size)
    model = given.model(grid.tensor, grid.pipeline.rank, grid.pipeline.size)
    with closing(Trainer(config, grid, model, NextToken(), PipelineBatches(given))) as trainer:
        yield lambda: trainer.step().loss, f"{trainer.schedule.name}, messages {way or 'without threads'}"
