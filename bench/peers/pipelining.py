"""Peer of ``bench.contest pipelining``: torch.distributed.pipelining over gloo, with the same stage modules.

1F1B; the losses of the last stage are those of `tplayers`. The two copies of the tied embedding are summed, and the
norm is that of the whole model, as its users have to do themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from bench.peers.group import process_group
from bench.programs.pipeline_task import PipelineTask
from tplayers import GPT, StageInput


class Alone:
    """A tensor group of this rank, without MPI."""

    rank, size, collectives_alone = 0, 1, False

    def all_reduce(self, *_: Any, **__: Any) -> None:
        """Do nothing: one rank has the sum."""


class Stage(nn.Module):
    """A stage as the library calls it: tokens or activations of a micro-batch -> activations."""

    def __init__(self, model: GPT, task: PipelineTask, *, first: bool) -> None:
        super().__init__()
        self.model, self.first = model, first
        self.tokens = torch.zeros((task.micro_batch_size, task.seq_length), dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return self.model.hidden_states(x)
        return self.model.hidden_states(self.tokens, at=StageInput(0, x))


@contextmanager
def contestant(task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """The step of a `PipelineTask`."""
    given = PipelineTask(**task)
    with process_group():
        rank, size = dist.get_rank(), dist.get_world_size()
        model = given.model(Alone(), rank, size)
        last, count = rank == size - 1, given.microbatches

        def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
            return model._losses(model._scores(hidden), labels.t()).mean() / count

        # A loss on every stage tells the library that there are backwards.
        stage = PipelineStage(Stage(model, given, first=rank == 0), rank, size, torch.device("cpu"))
        schedule = Schedule1F1B(stage, count, loss_fn=loss_of, scale_grads=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, weight_decay=0.01, fused=True)
        rows = given.tokens()
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        parameters = list(model.parameters())

        def step() -> float:
            optimizer.zero_grad(set_to_none=True)
            losses: list[Tensor] = []
            if rank == 0:
                schedule.step(tokens)
            elif last:
                schedule.step(target=labels, losses=losses)
            else:
                schedule.step()
            if rank == 0 or last:
                dist.all_reduce(model.embedding.weight.grad)  # of two stages: both are ends
            gradients = [p.grad for p in parameters if p.grad is not None]
            counted = gradients[1:] if last else gradients  # the embedding comes first, and counts on the first stage
            square = torch.stack(torch._foreach_norm(counted)).double().square().sum()
            told = torch.stack([square, torch.stack(losses).double().sum() if last else square.new_zeros(())])
            dist.all_reduce(told)
            norm = float(told[0].sqrt())
            if norm > 1.0:
                torch._foreach_mul_(gradients, 1.0 / (norm + 1e-6))
            optimizer.step()
            return float(told[1])

        yield step, "torch.distributed.pipelining, Schedule1F1B, gloo"
