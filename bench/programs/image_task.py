"""The step of all contestants of ``bench.contest data_parallel``: a residual network, images, SGD; and our step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from commengine import Communicator
from trainers.data_parallel import DataParallel

#: the classes, and the colours of an image
CLASSES, COLOURS = 10, 3


@dataclass(frozen=True)
class ImageTask:
    """One training step, described completely: ResNet-20 of He et al. 2016 (section 4.2), fp32, SGD with momentum.

    width: channels of the first stage; 16 is the paper's, with 0.27 million parameters. The loss is the mean over the
    global batch; each rank's batch norms see this rank's images.
    """

    width: int = 16
    blocks: int = 3  # of each of the three stages
    pixels: int = 32  # of each side of an image
    global_batch_size: int = 8
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 1e-4
    seed: int = 0

    def batch(self, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """A rank's images, fp32 [batch, colours, pixels, pixels], and labels, the same at every step."""
        random = np.random.default_rng(self.seed)
        images = random.standard_normal((self.global_batch_size, COLOURS, self.pixels, self.pixels), dtype=np.float32)
        labels = random.integers(0, CLASSES, self.global_batch_size)
        each = self.global_batch_size // ranks
        mine = slice(rank * each, (rank + 1) * each)
        return torch.from_numpy(images[mine].copy()), torch.from_numpy(labels[mine].copy())


class ResidualBlock(nn.Module):
    """Two convolutions of 3 x 3 with batch norms, beside the identity or a convolution of 1 x 1."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.beside: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.beside = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second_norm(self.second(self.first_norm(self.first(x)).relu()))
        result: Tensor = (y + self.beside(x)).relu()
        return result


def build(task: ImageTask) -> nn.Sequential:
    """The network with its initial weights, the same in every process."""
    torch.manual_seed(task.seed)
    layers: list[nn.Module] = [
        nn.Conv2d(COLOURS, task.width, 3, padding=1, bias=False), nn.BatchNorm2d(task.width), nn.ReLU(),
    ]  # fmt: skip
    channels = task.width
    for stage in range(3):
        for block in range(task.blocks):
            width = task.width << stage
            layers.append(ResidualBlock(channels, width, 2 if stage and not block else 1))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def make_step(task: ImageTask, model: nn.Module, rank: int, ranks: int) -> Callable[[], float]:
    """One step of ``model``, whose backward averages the gradients. It returns this rank's loss."""
    images, labels = task.batch(rank, ranks)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=task.lr, momentum=task.momentum, weight_decay=task.weight_decay, foreach=True
    )

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.item())

    return step


@contextmanager
def contestant_on(world: Communicator, task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """Our step of an `ImageTask`. way: "overlap" sends gradients while the backward goes on. Collective."""
    given = ImageTask(**task)
    net = build(given)
    with DataParallel(net, world, overlap=way == "overlap"):
        step = make_step(given, net, world.rank, world.size)
        yield step, f"overlap {'on' if way else 'off'}, buckets of 4 million elements"
