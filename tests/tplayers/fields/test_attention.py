"""FieldAttention against torch.nn.MultiheadAttention of all points, with a mask that keeps each point in its window."""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor, nn

import commengine
import tplayers
from commengine import CartesianGrid, Communicator, Decomposition
from tests.support.fields.comparison import close, cut, draw, equals_torchs, joined
from tests.support.fields.second_derivatives import equals_torchs_twice

pytestmark = [pytest.mark.mpi, pytest.mark.every_size]

F64 = torch.float64
#: the grids of a number of ranks
GRIDS = {
    1: [(1,), (1, 1), (1, 1, 1)],
    2: [(2,), (2, 1), (1, 2), (1, 2, 1), (1, 1, 2)],
    4: [(4,), (2, 2), (4, 1), (1, 4), (2, 1, 2), (1, 2, 2)],
}


@pytest.fixture(scope="module")
def comm(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield comm


class Whole(nn.MultiheadAttention):
    """torch's layer on the points of the whole field, with Swin's padding, roll, mask and table in its mask.

    All is taken from each pair of points: no window is cut.
    """

    def __init__(
        self, channels, heads, space, *, window_size=None, shift=0, shift_mode="masked", mask_padding=False,
        relative_position_bias=False, bias=True,
    ):  # fmt: skip
        super().__init__(channels, heads, bias=bias, batch_first=True, dtype=F64)
        self.space, self.window = space, window_size or space
        shift, modes = (
            (one,) * len(space) if isinstance(one, int | str) else one for one in (shift, shift_mode)
        )
        self.padded = [math.ceil(n / w) * w for n, w in zip(space, self.window, strict=True)]
        points = torch.tensor(list(itertools.product(*map(range, self.padded))))  # [all, axes]
        every = len(points)
        seen = torch.ones(every, every, dtype=torch.bool)
        self.distance = torch.zeros(every, every, dtype=torch.int64)
        for axis, (n, padded, w) in enumerate(zip(space, self.padded, self.window, strict=True)):
            s = 0 if padded == w else shift[axis]
            at = points[:, axis]
            rolled = (at - s) % padded
            seen &= rolled[:, None] // w == rolled // w
            if modes[axis] == "masked":
                seen &= (at < s)[:, None] == (at < s)
            if mask_padding:
                seen &= (at < n) | torch.eye(every, dtype=torch.bool)
            self.distance = self.distance * (2 * w - 1) + rolled[:, None] - rolled + w - 1
        self.distance[~seen] = 0
        self.mask = torch.zeros(every, every, dtype=F64).masked_fill(~seen, -torch.inf)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)
        if relative_position_bias:
            table = draw(math.prod(2 * w - 1 for w in self.window), heads, seed=4)
            self.relative_position_bias_table = nn.Parameter(table)

    def forward(self, x: Tensor) -> Tensor:
        more = [(0, padded - n) for n, padded in zip(self.space, self.padded, strict=True)]
        x = nn.functional.pad(x, [n for pair in reversed(more) for n in pair])
        tokens, mask = x.flatten(2).transpose(1, 2), self.mask.expand(x.shape[0] * self.num_heads, -1, -1)
        if hasattr(self, "relative_position_bias_table"):
            bias = self.relative_position_bias_table[self.distance].permute(2, 0, 1)
            mask = mask + bias.repeat(x.shape[0], 1, 1)
        # With need_weights it computes by a formula, which has second derivatives.
        y, _ = super().forward(tokens, tokens, tokens, attn_mask=mask, need_weights=True)
        return y.transpose(1, 2).reshape(x.shape)[(..., *(slice(0, n) for n in self.space))]


def cases(comm, number, most=4):
    """(grid, blocks, options): drawn, the same on all ranks. The sizes of blocks are any from 1 to ``most``."""
    for case in range(number):
        draw_ = random.Random(case)
        shape = GRIDS[comm.size][case % len(GRIDS[comm.size])]
        axes = len(shape)
        largest = {1: 3 * most, 2: most + 1, 3: most - 1}[axes]
        field = Decomposition(tuple(tuple(draw_.randint(1, largest) for _ in range(p)) for p in shape))
        options: dict = {"bias": draw_.random() < 0.7}
        if draw_.random() < 0.75:
            window = tuple(draw_.randint(1, 5 if axes < 3 else 3) for _ in shape)
            divides = [n % w == 0 for n, w in zip(field.shape, window, strict=True)]
            options |= {
                "window_size": window, "shift": tuple(draw_.randrange(w) * (draw_.random() < 0.8) for w in window),
                "shift_mode": tuple(draw_.choice(["masked", "circular"]) if d else "masked" for d in divides),
                "mask_padding": draw_.random() < 0.5, "relative_position_bias": draw_.random() < 0.5,
            }  # fmt: skip
        yield CartesianGrid(comm, shape), field, options, draw_.choice([1, 2]), draw_.randint(1, 2)


def pair(grid, field, options, heads):
    torch.manual_seed(5)
    ours = tplayers.FieldAttention(4, heads, grid, field, dtype=F64, **options)
    return ours, Whole(4, heads, field.shape, **options)


def test_equals_torchs(comm):
    for grid, field, options, heads, batch in cases(comm, 50):
        equals_torchs(*pair(grid, field, options, heads), draw(batch, 4, *field.shape), grid)


def test_second_derivatives_equal_torchs(comm):
    for grid, field, options, heads, batch in cases(comm, 50, most=3):
        equals_torchs_twice(*pair(grid, field, options, heads), draw(batch, 4, *field.shape), grid)
