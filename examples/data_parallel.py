"""Train a module of your own on several replicas, each split over a tensor group.

    mpirun -n 4 python examples/data_parallel.py

Ranks 0 and 1 hold the first replica, ranks 2 and 3 the second. On one rank the program prints the same losses, up to
the order of sums.
"""

import torch
from torch import nn

import tplayers
from commengine import Communicator, ProcessGrid, launch
from trainers.data_parallel import DataParallel

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
    torch.manual_seed(0)  # one rank then begins as four do
    model = Regression(grid.tensor)
    tplayers.initialize(model, seed=0)  # the layers of tplayers: equal at every tensor size
    replicas = DataParallel(model, grid)  # the layers of PyTorch begin with the values of the first replica
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x = torch.randn(GLOBAL_BATCH, 8, generator=data)  # the same on all ranks; each replica takes its part
        mine = x.chunk(grid.data.size)[grid.data.rank]
        target = mine.sin().sum(dim=1, keepdim=True)
        optimizer.zero_grad()
        # The factor makes it the mean over the global batch, also where the replicas' parts differ in size.
        loss = (model(mine) - target).square().sum() * replicas.sample_weight(len(mine))
        loss.backward()  # averages the gradients over the replicas
        norm = replicas.clip(1.0)
        optimizer.step()
        whole = loss.detach().clone()
        grid.data.all_reduce(whole, "avg")
        if world.rank == 0 and step in (0, STEPS - 1):
            print(f"step {step + 1}: loss {whole.item():.4f}, norm {norm:.4f}", flush=True)
    replicas.close()
    grid.close()


if __name__ == "__main__":
    launch.run(main, device="cpu")
