"""The step that every contestant of bench.fields makes: a U-Net on a field, its weights, data and optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: the memory layouts of a batch of fields
LAYOUTS = {"channels-first": torch.contiguous_format, "channels-last": torch.channels_last}


@dataclass(frozen=True)
class FieldTask:
    """One training step, described completely: fp32, AdamW (fused), mean squared error, the same batch at every step.

    points: of each of the two axes. width, depth: of the U-Net, with batch normalisation. layout: one of LAYOUTS.
    weights: safetensors file with the initial values. lr: small, because AdamW's first steps have this size for every
    weight, and where a gradient is near zero, rounding decides their sign.
    """

    points: int = 512
    batch: int = 1
    channels: int = 4
    width: int = 16
    depth: int = 3
    padding_mode: str = "zeros"
    layout: str = "channels-last"
    lr: float = 1e-4
    seed: int = 0
    weights: str = ""

    def fields(self) -> tuple[Tensor, Tensor]:
        """The whole input and the whole target, float32 [batch, channels, points, points]."""
        draws = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.channels, self.points, self.points)
        data = torch.randn(shape, generator=draws)
        return data, data.roll((1, 2), (2, 3)) * 0.5

    @property
    def memory_format(self) -> torch.memory_format:
        """The memory layout, as torch names it."""
        return LAYOUTS[self.layout]

    def placed(self, x: Tensor) -> Tensor:
        """``x`` in the task's memory layout."""
        return x.contiguous(memory_format=self.memory_format)

    def save(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def load(path: Path | str) -> FieldTask:
        return FieldTask(**json.loads(Path(path).read_text()))


def adamw(task: FieldTask, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """The optimizer of all contestants."""
    return torch.optim.AdamW(list(parameters), lr=task.lr, fused=True)


def make_step(task: FieldTask, model: Any, data: Tensor, target: Tensor, ranks: int) -> Callable[[], float]:
    """One training step on this rank's block of the batch; its loss has the whole batch's as its mean over the ranks.

    model: an nn.Module, which gets the task's memory layout, as the block does.
    """
    model.to(memory_format=task.memory_format).train()
    data, target = task.placed(data), task.placed(target)
    optimizer = adamw(task, model.parameters())
    values = task.batch * task.channels * task.points**2

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(model(data), target, reduction="sum") / values
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.item()) * ranks

    return step
