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
from tests.support.fields.comparison import close, cut, draw, equals_torchs
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
        window, shift, modes = (
            (one,) * len(space) if isinstance(one, int | str) else one
            for one in (window_size or space, shift, shift_mode)
        )
        self.space, self.window = space, window
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
    """(grid, blocks, options): drawn, the same on all ranks. most: a measure of the blocks' sizes."""
    for case in range(number):
        draw_ = random.Random(case)
        shape = GRIDS[comm.size][case % len(GRIDS[comm.size])]
        axes = len(shape)
        largest = {1: 3 * most, 2: most + 1, 3: most - 1}[axes]
        field = Decomposition(tuple(tuple(draw_.randint(1, largest) for _ in range(p)) for p in shape))
        options: dict = {"bias": draw_.random() < 0.7}
        if draw_.random() < 0.75:
            some = [[w for w in range(2, 6) if n % w == 0 or draw_.random() < 0.3] or [1] for n in field.shape]
            window = tuple(map(draw_.choice, some))
            modes = [["masked", *["circular"] * 2 * (n % w == 0)] for n, w in zip(field.shape, window, strict=True)]
            options |= {
                "window_size": window, "shift": tuple(draw_.choice([0, w // 2, w - 1]) for w in window),
                "shift_mode": tuple(map(draw_.choice, modes)),
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


@pytest.mark.slow
@pytest.mark.sizes(1, 2)
def test_second_derivatives_equal_torchs(comm):
    for grid, field, options, heads, batch in cases(comm, 50, most=3):
        equals_torchs_twice(*pair(grid, field, options, heads), draw(batch, 4, *field.shape), grid)


def test_ranks_without_a_window(comm):
    """One window, or three on four ranks: the others send their points there, and take part in both backwards."""
    grid = CartesianGrid(comm, (comm.size,))
    field = Decomposition(((2,) * comm.size,))
    for options in ({"window_size": 2 * comm.size}, {"window_size": (3,), "shift": 2, "relative_position_bias": True}):
        ours, theirs = pair(grid, field, options, 2)
        whole = draw(2, 4, *field.shape)
        equals_torchs(ours, theirs, whole, grid)
        equals_torchs_twice(ours, theirs, whole, grid)
        for layer, x in ((ours, cut(whole, field, grid)), (theirs, whole)):  # of which no gradient is wanted
            layer.zero_grad()
            layer(x).pow(3).sum().backward()
        for mine, one in zip(ours.parameters(), theirs.parameters(), strict=True):
            close(mine.grad, one.grad)


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.sizes(2)
@pytest.mark.parametrize("options", [{}, {"window_size": 1300, "shift": 700}, {"window_size": 1300}])
def test_more_keys_than_a_kernel_takes_at_a_time(comm, options):
    """Of a block of keys that are all masked nothing may remain."""
    grid = CartesianGrid(comm, (comm.size,))
    field = Decomposition(((1500 - 100 * (comm.size - 1), *[100] * (comm.size - 1)),))
    equals_torchs(*pair(grid, field, options | {"mask_padding": True}, 2), draw(1, 4, *field.shape), grid)


@pytest.mark.mpi(min_size=2)
def test_what_is_sent(comm):
    """Whole windows on a rank send nothing but the parameters' gradients; else the field goes there and back."""
    grid, channels = CartesianGrid(comm, (comm.size, 1)), 4
    field = grid.decompose((8 * comm.size, 8))

    def sent(**options):
        layer = tplayers.FieldAttention(channels, 2, grid, field, **options)
        tplayers.initialize(layer, 1)
        x = cut(draw(1, channels, *field.shape), field, grid).float()
        layer(x.requires_grad_())
        with commengine.trace(comm) as log:
            layer(x).sum().backward()
        return [(event.operation, event.elements) for event in log.events]

    gradients = ("all_reduce", 3 * channels * channels + 3 * channels + channels * channels + channels)
    assert sent(window_size=4) == [gradients]
    assert [name for name, _ in sent(window_size=4, shift=2)] == ["exchange"] * 4 + ["all_reduce"]
    keys_and_values = 2 * channels * field.points()
    found = [one for one in sent() if one[1] >= channels]
    assert found == [("all_gather", keys_and_values), ("reduce_scatter", keys_and_values), gradients]


@pytest.mark.parametrize("options", [{}, {"window_size": 4}, {"window_size": 3, "shift": 1}])
def test_memory_formats_and_halves(comm, options):
    grid = CartesianGrid(comm, (1, comm.size))
    field = grid.decompose((4, 4 * comm.size))
    layer = tplayers.FieldAttention(4, 2, grid, field, **options)
    tplayers.initialize(layer, 1)
    x = cut(draw(2, 4, *field.shape), field, grid).float()
    y, turned = layer(x), layer(x.to(memory_format=torch.channels_last))
    assert y.is_contiguous() and turned.is_contiguous(memory_format=torch.channels_last)
    close(y, turned, tolerance=1e-6)
    layer.bfloat16()
    x = x.bfloat16().requires_grad_()
    half = layer(x)
    half.square().sum().backward()
    assert half.dtype == x.grad.dtype == torch.bfloat16
    close(half.float(), y, tolerance=0.05)


def test_a_recomputed_layer(comm):
    grid = CartesianGrid(comm, (comm.size, 1))
    field = Decomposition(((3, *[2] * (comm.size - 1)), (4,)))
    layer = tplayers.FieldAttention(4, 2, grid, field, window_size=2, shift=1, dtype=F64)
    tplayers.initialize(layer, 1)
    gradients = []
    for again in (False, True):
        x = cut(draw(2, 4, *field.shape), field, grid).requires_grad_()
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        y.pow(3).sum().backward()
        gradients.append((x.grad, *(p.grad for p in layer.parameters())))
        layer.zero_grad()
    for one, other in zip(*gradients, strict=True):
        close(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "heads=3 must divide channels=4"),
        ({"heads": 0}, "heads=0 must divide channels=4"),
        ({"window_size": 0}, "window_size=0 must be whole numbers of at least 1"),
        ({"window_size": (2, 2, 2)}, "one value, or one for each of the 2 axes"),
        ({"window_size": 4, "shift": 4}, "shift=4 must be smaller than window_size=4"),
        ({"window_size": (4, 2), "shift": (1, 2)}, r"shift=\(1, 2\) must be smaller than window_size=\(4, 2\)"),
        ({"window_size": 4, "shift": -1}, "shift=-1 must be whole numbers of at least 0"),
        ({"window_size": 4, "shift_mode": "roll"}, "shift_mode='roll' must be one of masked, circular"),
        ({"window_size": 3, "shift": 1, "shift_mode": "circular"}, "3 does not divide the 8 points of axis 0"),
        ({"shift": 1}, "need a window_size"),
        ({"relative_position_bias": True}, "need a window_size"),
    ],
)
def test_arguments_that_do_not_fit(comm, options, message):
    grid = CartesianGrid(comm, (1, comm.size))
    with pytest.raises(ValueError, match=message):
        tplayers.FieldAttention(4, grid=grid, input=grid.decompose((8, 8 * comm.size)), **({"heads": 2} | options))
