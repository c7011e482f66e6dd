"""DataParallel, tensor 2 x data 2, on 4 ranks, with each kind of shared memory of both groups, against the results."""

import torch

from commengine import Communicator, ProcessGrid, launch
from tplayers import MLP, initialize
from trainers.data_parallel import DataParallel

ELEMENTS = 1 << 21  # 8 MiB a rank for each window


def main(world: Communicator) -> None:
    with ProcessGrid(world, tensor=2) as grid:
        net = MLP(1024, 4096, grid.tensor)
        initialize(net, seed=0)
        replicas = DataParallel(net, grid)
        torch.manual_seed(grid.data.rank)
        x = torch.randn(512, 1024)
        net(x).sum().backward()
        averaged = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        with replicas.no_sync():
            net(x).sum().backward()
        for mine, p in zip(averaged, net.parameters(), strict=True):
            every = torch.empty(2 * p.numel())
            grid.data.all_gather(every, p.grad.reshape(-1).contiguous())
            torch.testing.assert_close(mine, every.view(2, *p.shape).mean(0))
        for group in (grid.tensor, grid.data):
            windows = [group.empty((ELEMENTS,)) for _ in range(2)]
            for number, kept in enumerate((*windows, torch.empty(ELEMENTS))):
                group.all_reduce(kept.fill_(number + group.rank))
                assert kept.eq(2 * number + 1).all()
        replicas.close()
    if world.rank == 0:
        print("right")


launch.run(main)
