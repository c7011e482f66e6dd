"""Train a module of your own on several replicas, each split over a tensor group.

    mpirun -n 4 python examples/data_parallel.py

Ranks 0 and 1 hold the first replica, ranks 2 and 3 the second. On one rank the program prints the same losses, up to
the order of sums.
"""

import torch
from torch import nn

import tplayers
from commengine import Communicator, ProcessGrid, launch
from trainers.training.clipping import clip, gradient_norm
from trainers.training.optimizer import Optimizer
from trainers.training.reduction import GradientBuckets

STEPS, GLOBAL_BATCH, WIDTH = 20, 16, 32


class Regression(nn.Module):
    """Layers of PyTorch, which every rank holds whole, around a layer that the tensor group splits."""

    def __init__(self, tensor: Communicator) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.mlp = tplayers.MLP(WIDTH, 4 * WIDTH, tensor)
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.tanh(self.mlp(self.enter(x))))


def main(world: Communicator) -> None:
    """One rank of the job."""
    grid = ProcessGrid(world, tensor=2 if world.size % 2 == 0 else 1)
    torch.manual_seed(0)  # PyTorch's layers must begin equal on all ranks
    model = Regression(grid.tensor)
    tplayers.initialize(model, seed=0)  # the layers of tplayers: equal at every tensor size
    gradients = GradientBuckets(model, grid.data, tensor=grid.tensor, overlap=False, bucket_size=4_000_000)
    optimizer = Optimizer(gradients, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8)
    data = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x = torch.randn(GLOBAL_BATCH, 8, generator=data)  # the same on all ranks; each replica takes its part
        mine = x.chunk(grid.data.size)[grid.data.rank]
        target = mine.sin().sum(dim=1, keepdim=True)
        gradients.zero()
        with gradients.last_microbatch():  # a backward before this one would only add to the gradients
            # Divided by the size of the global batch: the sum over the replicas is then the mean.
            loss = (model(mine) - target).square().sum() / GLOBAL_BATCH
            loss.backward()
        gradients.finish()  # summed over the replicas
        norm = gradient_norm(gradients.segments, grid.tensor)
        clip(gradients.segments, norm, 1.0)
        optimizer.step(1e-2)
        whole = loss.detach().clone()
        grid.data.all_reduce(whole)
        if world.rank == 0 and step in (0, STEPS - 1):
            print(f"step {step + 1}: loss {whole.item():.4f}, norm {norm:.4f}", flush=True)
    gradients.remove()
    grid.close()


if __name__ == "__main__":
    launch.run(main)
