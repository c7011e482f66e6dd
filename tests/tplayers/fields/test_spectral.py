"""SpectralConv on split fields against torch's FFT of the whole field."""

import pytest
import torch

import commengine
import tplayers
from commengine import CartesianGrid, Communicator, Decomposition
from tests.support.fields.comparison import cut, draw, equals_torchs
from tests.support.fields.whole_spectrum import Whole

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


@pytest.fixture(scope="module")
def comm(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield comm


def uneven(points, ranks):
    """Block sizes, the last one largest."""
    return (*[points // ranks - 1] * (ranks - 1), points - (points // ranks - 1) * (ranks - 1))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    ("space", "modes", "channels"),
    [((17,), (9,), (3, 2)), ((12, 13), (3, 7), (2, 5)), ((13, 8), (6, 2), (5, 1)), ((8, 9, 10), (2, 3, 6), (2, 2))],
)
def test_equals_the_transform_of_the_whole_field(comm, space, modes, channels, axis):
    if axis >= len(space):
        return
    shape = tuple(comm.size if a == axis else 1 for a in range(len(space)))
    grid = CartesianGrid(comm, shape)
    field = Decomposition(tuple(uneven(n, p) for n, p in zip(space, shape, strict=True)))
    layer = tplayers.SpectralConv(*channels, modes, grid, field, dtype=torch.float64)
    weight = draw(*layer.weight.shape, seed=2)
    equals_torchs(layer, Whole(weight, modes), draw(2, channels[0], *space), grid)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)])
@pytest.mark.parametrize("modes", [(2, 3, 2), (1, 1, 1)])  # with one mode of the last axis some ranks have none
def test_axes_split_both_ways(comm, shape, modes):
    grid, space = CartesianGrid(comm, shape), (8, 7, 6)[: len(shape)]
    field = Decomposition(tuple(uneven(n, p) for n, p in zip(space, shape, strict=True)))
    layer = tplayers.SpectralConv(3, 2, modes[: len(shape)], grid, field, dtype=torch.float64)
    weight = draw(*layer.weight.shape, seed=2)
    equals_torchs(layer, Whole(weight, modes[: len(shape)]), draw(1, 3, *space), grid)


@pytest.mark.mpi(min_size=2)
def test_axes_that_no_rank_splits_are_cut_to_their_modes_before_they_travel(comm):
    grid = CartesianGrid(comm, (comm.size, 1))
    n, channels, kept = 8 * comm.size, 2 * comm.size, 3
    field = grid.decompose((n, n))
    layer = tplayers.SpectralConv(channels, channels, kept, grid, field)
    tplayers.initialize(layer, 1)
    x = cut(draw(1, channels, n, n), field, grid).float()
    layer(x)
    with commengine.trace(comm) as log:
        layer(x)
    others = comm.size - 1
    # There and back, sent and received: two channels' rows of 8 positions, for each other rank; a complex is 8 bytes.
    of_field = 2 * 2 * (2 * 8 * others) * kept * 8
    mine = layer.weight.shape[2] // comm.size + (comm.rank < layer.weight.shape[2] % comm.size)
    # Of its 2 * kept lines a rank gives the others their modes, and gets its own modes of theirs.
    of_modes = 2 * 2 * kept * (2 * kept - mine + others * mine) * 8
    assert [event.operation for event in log.events] == ["exchange"] * 4
    assert sum(event.bytes for event in log.events) == of_field + of_modes


def test_too_many_modes(comm):
    grid = CartesianGrid(comm, (1, comm.size))
    with pytest.raises(ValueError, match="axis 0 has 8 points, so at most 4 modes, not 5"):
        tplayers.SpectralConv(1, 1, 5, grid, grid.decompose((8, 8 * comm.size)))
    tplayers.SpectralConv(1, 1, (4, 4 * comm.size + 1), grid, grid.decompose((8, 8 * comm.size)))
