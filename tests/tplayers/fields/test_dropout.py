"""FieldDropout: one mask on any number of ranks, in a recomputation, and in derivatives of any order."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import commengine
import tplayers
from commengine import CartesianGrid, CollectiveError, CollectiveMismatch, Communicator, Decomposition
from tests.support.fields.comparison import close, cut, draw, equals_torchs, joined
from tests.support.fields.second_derivatives import equals_torchs_twice

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

F64 = torch.float64
GRIDS = {
    1: [(1,), (1, 1), (1, 1, 1)],
    2: [(2,), (2, 1), (1, 2), (1, 2, 1)],
    4: [(4,), (2, 2), (4, 1), (1, 4), (2, 1, 2)],
}


@pytest.fixture(scope="module")
def comm(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield comm


@pytest.fixture(scope="module")
def alone():
    from mpi4py import MPI

    with Communicator(MPI.COMM_SELF, device="cpu") as comm:
        yield comm


def layer_of(grid, field, p=0.4, seed=1, iteration=0, batch=2, first=0, **options):
    layer = tplayers.FieldDropout(p, grid, field, **options)
    tplayers.set_randomness(layer, tplayers.Randomness(seed, iteration, range(first, first + batch)))
    return layer


def mask_of(alone, space, channels, batch=2, **options):
    """What one rank keeps of a whole field of ones."""
    grid = CartesianGrid(alone, (1,) * len(space))
    ones = torch.ones(batch, channels, *space, dtype=F64)
    return layer_of(grid, grid.decompose(space), batch=batch, **options)(ones)


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return x * self.mask


def cases(comm, number):
    """(grid, blocks, p, whole_channels): drawn, the same on all ranks."""
    for case in range(number):
        draw_ = random.Random(case)
        shape = GRIDS[comm.size][case % len(GRIDS[comm.size])]
        field = Decomposition(tuple(tuple(draw_.randint(1, 7 - len(shape)) for _ in range(p)) for p in shape))
        yield CartesianGrid(comm, shape), field, draw_.uniform(0.1, 0.9), draw_.random() < 0.4


def test_the_mask_is_that_of_one_rank_and_so_are_all_derivatives(comm, alone):
    for number, (grid, field, p, whole_channels) in enumerate(cases(comm, 50)):
        options = {"p": p, "whole_channels": whole_channels, "seed": number}
        ours = layer_of(grid, field, **options)
        theirs = Masked(mask_of(alone, field.shape, 3, **options))
        whole = draw(2, 3, *field.shape)
        equals_torchs(ours, theirs, whole, grid, tolerance=1e-15)
        equals_torchs_twice(ours, theirs, whole, grid)


def test_a_mask_is_drawn_by_the_probability(comm):
    """Each value by itself: also two neighbours, across the borders of blocks, samples or channels, are independent."""
    grid, p = CartesianGrid(comm, (comm.size, 1)), 0.3
    field = grid.decompose((64, 50))
    x = torch.full((4, 6, *field.local_shape(grid.coords)), 2.0)
    y = joined(layer_of(grid, field, p, batch=4)(x), field, grid)
    kept = (y != 0).double()
    close(y[y != 0], torch.full_like(y[y != 0], 2 / 0.7), tolerance=1e-6)
    assert abs(kept.mean() - 0.7) < 4 * (0.21 / kept.numel()) ** 0.5
    for dim in range(4):
        both = (kept.narrow(dim, 1, kept.shape[dim] - 1) * kept.narrow(dim, 0, kept.shape[dim] - 1)).mean()
        assert abs(both - 0.49) < 0.01, dim


def test_whole_channels_are_dropped(comm):
    grid, p = CartesianGrid(comm, (1, comm.size)), 0.3
    field = grid.decompose((2, 3 * comm.size))
    x = torch.ones((40, 50, *field.local_shape(grid.coords)))
    y = joined(layer_of(grid, field, p, batch=40, whole_channels=True)(x), field, grid)
    kept = (y != 0).flatten(2)
    assert (kept.all(2) | ~kept.any(2)).all()
    assert abs(kept.double().mean() - 0.7) < 4 * (0.21 / 2000) ** 0.5
    assert not kept[0].equal(kept[1]) and not kept[:, 0].equal(kept[:, 1])


def test_seed_iteration_sample_and_place_in_the_model_give_other_masks(comm):
    grid = CartesianGrid(comm, (comm.size,))
    field = grid.decompose((200 * comm.size,))
    ones = torch.ones(1, 2, *field.local_shape(grid.coords))
    model = nn.Sequential(tplayers.FieldDropout(0.5, grid, field), tplayers.FieldDropout(0.5, grid, field))
    tplayers.set_randomness(model, tplayers.Randomness(1, 0, [0]))
    found = [layer(ones) for layer in model]
    found += [layer_of(grid, field, 0.5, **{"batch": 1, name: 7})(ones) for name in ("seed", "iteration", "first")]
    for one, other in itertools.combinations(found, 2):
        assert 0.3 < (one == other).double().mean() < 0.7
    assert torch.equal(model[0](ones), found[0])  # until the next call of set_randomness


@pytest.mark.parametrize("whole_channels", [False, True])
def test_evaluation_and_the_ends_of_p(comm, whole_channels):
    grid = CartesianGrid(comm, (comm.size,))
    field = grid.decompose((3 * comm.size,))
    x = draw(2, 3, 3, seed=comm.rank)
    quiet = tplayers.FieldDropout(0.5, grid, field, whole_channels=whole_channels).eval()
    assert quiet(x) is x  # with no randomness
    assert tplayers.FieldDropout(0, grid, field, whole_channels=whole_channels)(x) is x
    assert not layer_of(grid, field, 1, whole_channels=whole_channels)(x).any()
    y = layer_of(grid, field, whole_channels=whole_channels)(x.bfloat16())
    assert y.dtype == torch.bfloat16


def test_a_recomputation_has_the_same_mask_and_one_of_another_pass_raises(comm):
    grid = CartesianGrid(comm, (comm.size, 1))
    field = Decomposition(((3, *[2] * (comm.size - 1)), (4,)))
    model = nn.Sequential(
        tplayers.FieldConv(2, 2, 3, grid, field, padding=1, dtype=F64), nn.Tanh(),
        tplayers.FieldDropout(0.5, grid, field), tplayers.FieldConv(2, 2, 3, grid, field, padding=1, dtype=F64),
    )  # fmt: skip
    tplayers.initialize(model, 1)
    x, gradients = cut(draw(2, 2, *field.shape), field, grid), []
    for again in (False, True):
        tplayers.set_randomness(model, tplayers.Randomness(1, 5, [3, 4]))
        y = checkpoint(model, x, use_reentrant=False) if again else model(x)
        y.pow(3).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
    y = checkpoint(model, x, use_reentrant=False)
    tplayers.set_randomness(model, tplayers.Randomness(1, 6, [3, 4]))
    with pytest.raises(CheckpointError, match="different metadata"):
        y.sum().backward()


def test_nothing_is_sent(comm):
    grid = CartesianGrid(comm, (comm.size,))
    field = grid.decompose((3 * comm.size,))
    layer, x = layer_of(grid, field), draw(2, 3, 3).requires_grad_()
    layer(x)
    with commengine.trace(comm) as log:
        layer(x).sum().backward()
    assert not log.events


def test_what_is_refused_on_every_rank(comm):
    grid = CartesianGrid(comm, (comm.size,))
    field = grid.decompose((3 * comm.size,))
    for p in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"p={p} must be a probability"):
            tplayers.FieldDropout(p, grid, field)
    kind = CollectiveError if comm.size > 1 else ValueError
    with pytest.raises(kind, match=r"FieldDropout needs tplayers\.set_randomness"):
        tplayers.FieldDropout(0.5, grid, field)(draw(2, 3, 3))
    with pytest.raises(kind, match="randomness of 3 samples, and x has 2"):
        layer_of(grid, field, batch=3)(draw(2, 3, 3))
    if comm.size > 1:
        with pytest.raises(CollectiveMismatch, match="drawn_for"):
            layer_of(grid, field, seed=comm.rank)(draw(2, 3, 3))
