"""DataParallel over replicas that are split in space: the same numbers as on one rank with all samples."""

import pytest
import torch
from torch import nn

from commengine import CartesianGrid, ProcessGrid
from tplayers import FieldConv, UNet, initialize
from trainers.data_parallel import DataParallel

pytestmark = pytest.mark.mpi  # on 2 ranks; space and data at once need 4, on which make test-long runs it

SHAPE, SAMPLES, STEPS = (12, 8), 4, 3


def trained(world, space, fields, targets):
    """(The network, the gradient's norms, the replicas): ``space`` ranks for each replica."""
    norms = []
    with ProcessGrid(world, space) as grid:
        ranks = CartesianGrid(grid.tensor, (space, 1))
        blocks = ranks.decompose(SHAPE)
        net = UNet(1, 2, ranks, blocks, width=4, depth=1, padding_mode="circular", norm="group", dtype=torch.float64)
        initialize(net, 3)
        with DataParallel(net, grid, overlap=True, bucket_size=500) as replicas:
            optimizer = replicas.sharded(torch.optim.SGD, lr=0.1, momentum=0.9)
            each = SAMPLES // grid.data.size
            samples = slice(grid.data.rank * each, (grid.data.rank + 1) * each)
            block = (samples, slice(None), *blocks.slices(ranks.coords))
            for _ in range(STEPS):
                optimizer.zero_grad()
                weight = replicas.sample_weight(each * targets[0].numel())
                (nn.functional.mse_loss(net(fields[block]), targets[block], reduction="sum") * weight).backward()
                norms.append(replicas.clip(0.5))
                optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}, norms


def test_space_and_data_together_equal_one_rank(world, alone):
    drawn = torch.Generator().manual_seed(6)
    fields = torch.randn(SAMPLES, 1, *SHAPE, dtype=torch.float64, generator=drawn)
    targets = torch.randn(SAMPLES, 2, *SHAPE, dtype=torch.float64, generator=drawn)
    expected, norms = trained(alone, 1, fields, targets)
    assert min(norms) > 0.5  # each step is clipped
    for space in (size for size in (1, 2, 4) if world.size % size == 0 and SAMPLES % (world.size // size) == 0):
        found, ours = trained(world, space, fields, targets)
        assert ours == pytest.approx(norms, rel=1e-11)
        for name, parameter in found.items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-10, atol=1e-12, msg=name)
            first = parameter.clone()
            world.broadcast(first)
            assert first.equal(parameter), f"{name}: not the same bits on all ranks"


@pytest.mark.mpi(min_size=2)
def test_a_layer_of_torch_on_the_blocks_of_a_field_is_an_error_on_every_rank(world):
    """Its gradients are those of one block: without the error each rank would train weights of its own."""
    with ProcessGrid(world, world.size) as grid:
        ranks = CartesianGrid(grid.tensor, (world.size, 1))
        blocks = ranks.decompose((2 * world.size, 6))
        x = torch.randn(1, 1, *blocks.local_shape(ranks.coords)) + ranks.rank
        for last in (nn.Conv2d(2, 1, 1), FieldConv(2, 1, 1, ranks, blocks)):
            net = nn.Sequential(FieldConv(1, 2, 3, ranks, blocks, padding=1), last)
            initialize(net, 3)
            with DataParallel(net, grid) as replicas:
                if isinstance(last, FieldConv):
                    for _ in range(2):
                        net(x).square().sum().backward()
                    assert replicas.clip(0) > 0
                    continue
                for _ in range(2):
                    with pytest.raises(
                        RuntimeError, match=r"different gradients .*: 1.weight \(norms .*1.bias .*FieldConv"
                    ):
                        net(x).square().sum().backward()


def test_a_layer_that_every_rank_computes_in_full_is_none(world):
    """A tensor group that holds a module more than once has its gradient on each rank."""
    with ProcessGrid(world, world.size) as grid, DataParallel(net := nn.Linear(3, 2), grid):
        net(torch.arange(3.0)).sum().backward()
        assert net.weight.grad.equal(torch.arange(3.0).expand(2, 3))
