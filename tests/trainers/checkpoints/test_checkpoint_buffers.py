"""A module's buffers and frozen parameters are in the trainer's checkpoints; before, loading such a module failed."""

from pathlib import Path

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.mpi]


class Net(nn.Module):
    """A trained and a frozen parameter, saved buffers of two dtypes, and one that is not saved."""

    def __init__(self, value):
        super().__init__()
        self.trained = nn.Linear(3, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("scratch", torch.full((2,), value), persistent=False)
        with torch.no_grad():
            for tensor in (*self.parameters(), self.norm.running_mean):
                tensor.fill_(value)
            self.norm.num_batches_tracked.fill_(int(value))


def made(grid, value, dtype):
    from trainers.training.optimizer import Optimizer
    from trainers.training.reduction import GradientBuckets

    net = Net(value).to(dtype)
    gradients = GradientBuckets(net, grid.data, overlap=False, bucket_size=100)
    return net, Optimizer(gradients, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
def test_buffers_and_frozen_parameters_come_back(world, tmp_path, dtypes):
    from commengine import ProcessGrid
    from trainers.checkpoints import checkpoint
    from trainers.checkpoints.checkpoint_writer import CheckpointWriter

    folder = Path(world.mpi.bcast(str(tmp_path)))
    with ProcessGrid(world) as grid:
        net, optimizer = made(grid, 5.0, dtypes[0])
        assert {name.partition(".")[2] for name in optimizer.described()}.isdisjoint({"frozen.weight", "frozen.bias"})
        progress = checkpoint.Progress(1, 1, masters=optimizer.masters)
        CheckpointWriter(folder, progress, net, optimizer, {}, grid).finish()
        other, other_optimizer = made(grid, 7.0, dtypes[1])
        checkpoint.load(folder / "iter_0000001", progress, other, other_optimizer, grid)
        for name, tensor in other.state_dict().items():
            assert tensor.float().equal(net.state_dict()[name].float()), name
        assert other.scratch.tolist() == [7.0, 7.0]
        assert other.norm.num_batches_tracked.dtype == torch.int64 and other.norm.num_batches_tracked == 5
