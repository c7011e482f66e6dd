"""SpectralConv on split fields against torch's FFT of the whole field."""

import pytest
import torch
from torch import nn

import commengine
import tplayers
from commengine import CartesianGrid, Communicator, Decomposition
from tests.support.fields.comparison import cut, draw, equals_torchs

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]


class Whole(nn.Module):
    """The same operator by one FFT over all axes, with a loop over the corners of the spectrum."""

    def __init__(self, weight, modes):
        super().__init__()
        self.weight, self.modes = nn.Parameter(weight), modes

    def forward(self, x):
        space = x.shape[2:]
        dims = tuple(range(2, x.dim()))
        spectrum = torch.fft.rfftn(x, dim=dims)
        matrices = torch.view_as_complex(self.weight)
        result = torch.zeros(x.shape[0], matrices.shape[1], *spectrum.shape[2:], dtype=spectrum.dtype)
        for corner in range(2 ** (len(space) - 1)):
            there, mine = [], []
            for axis, (n, m) in enumerate(zip(space, self.modes, strict=True)):
                negative = axis < len(space) - 1 and corner >> axis & 1
                there.append(slice(n - m, n) if negative else slice(0, m))
                mine.append(slice(m, 2 * m) if negative else slice(0, m))
            there, mine = (..., *there), (..., *mine)
            result[there] = torch.einsum("bi...,io...->bo...", spectrum[there], matrices[mine])
        return torch.fft.irfftn(result, s=space, dim=dims)


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
def test_axes_split_both_ways(comm):
    grid = CartesianGrid(comm, (2, comm.size // 2, 1))
    field = grid.decompose((8, 7, 6))
    layer = tplayers.SpectralConv(3, 2, (2, 3, 4), grid, field, dtype=torch.float64)
    equals_torchs(layer, Whole(draw(*layer.weight.shape, seed=2), (2, 3, 4)), draw(1, 3, 8, 7, 6), grid)


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
    modes = 2 * kept * kept
    others = comm.size - 1
    # There and back, sent and received: two channels' rows of 8 positions, for each other rank; a complex is 8 bytes.
    of_field = 2 * 2 * (2 * 8 * others) * kept * 8
    shares = [modes // comm.size + (rank < modes % comm.size) for rank in range(comm.size)]
    mine = shares[comm.rank]
    of_modes = 2 * 2 * 4 * (2 * (modes - mine) + (channels - 2) * mine)
    assert [event.operation for event in log.events] == ["exchange"] * 4
    assert sum(event.bytes for event in log.events) == of_field + of_modes


def test_too_many_modes(comm):
    grid = CartesianGrid(comm, (1, comm.size))
    with pytest.raises(ValueError, match="axis 0 has 8 points, so at most 4 modes, not 5"):
        tplayers.SpectralConv(1, 1, 5, grid, grid.decompose((8, 8 * comm.size)))
    tplayers.SpectralConv(1, 1, (4, 4 * comm.size + 1), grid, grid.decompose((8, 8 * comm.size)))
