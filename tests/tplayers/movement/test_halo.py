"""Halo exchange on real ranks, against torch's padding of the whole field."""

import pytest
import torch
from torch.nn.functional import pad

from commengine import CartesianGrid, CollectiveError, Decomposition, trace
from tests.support.adjoints import assert_dot_product, assert_gradients, random
from tplayers.movement.halo import halo_accumulate, halo_exchange, plan_halo, start_halo_exchange
from tplayers.movement.transfer import start_transfer, transfer

MODES = {"zeros": "constant", "circular": "circular", "reflect": "reflect", "replicate": "replicate"}


def grids(group):
    """(grid shape, global shape, widths): even and uneven blocks, corners, halos wider than a neighbour's block."""
    p = group.size
    yield (p,), (4 * p,), 1
    yield (p,), (2 * p + 2,), [(3, 2)]
    yield (1, p), (5, 3 * p + 2), [(1, 2), (0, 4)]
    yield (p, 1), (3 * p + 2, 4), [2, 1]
    yield (1, p, 1), (3, 2 * p, 4), 1
    if p == 4:
        yield (2, 2), (7, 9), [(2, 1), (1, 3)]
        yield (2, 1, 2), (5, 3, 7), [2, (0, 1), 1]


def whole_field(shape, widths, mode, dtype):
    """The field [2, 3, space], and the same with its padding."""
    field = random((2, 3, *shape), dtype, 7)
    ends = [(w, w) if isinstance(w, int) else w for w in ([widths] * len(shape) if isinstance(widths, int) else widths)]
    flat = [end for pair in reversed(ends) for end in pair]
    return field, pad(field, flat, mode=MODES[mode]), ends


@pytest.mark.mpi(min_size=1)
@pytest.mark.every_size
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64])
def test_halos_are_those_of_the_padded_field(groups, mode, dtype):
    for group, (grid_shape, shape, widths) in [(one, case) for one in groups for case in grids(one)]:
        field, padded, ends = whole_field(shape, widths, mode, dtype)
        grid = CartesianGrid(group, grid_shape)
        blocks = grid.decompose(shape)
        mine = blocks.slices(grid.coords)
        x = field[(..., *mine)].clone()

        def exchange(x, grid=grid, widths=widths, blocks=blocks):
            return halo_exchange(x, grid, widths, decomposition=blocks, padding=mode)

        around = [slice(span.start, span.stop + low + high) for span, (low, high) in zip(mine, ends, strict=True)]
        assert torch.equal(assert_dot_product(exchange, x, group), padded[(..., *around)])
        assert torch.equal(halo_exchange(x, grid, widths, padding=mode), padded[(..., *around)])  # shapes are exchanged

        def accumulate(y, grid=grid, widths=widths, blocks=blocks):
            return halo_accumulate(y, grid, widths, decomposition=blocks, padding=mode)

        y = random(padded[(..., *around)].shape, dtype, group.rank)
        back = assert_dot_product(accumulate, y, group)
        leaf = field.clone().requires_grad_()  # the same sums, by autograd on the whole field, from all ranks' blocks
        total = torch.zeros((), dtype=dtype)
        for rank in range(group.size):
            spans = blocks.slices(grid.coords_at(rank))
            part = [slice(s.start, s.stop + low + high) for s, (low, high) in zip(spans, ends, strict=True)]
            view = pad(leaf, [end for pair in reversed(ends) for end in pair], mode=MODES[mode])[(..., *part)]
            total = total + (view * random(view.shape, dtype, rank)).sum()
        total.backward()
        torch.testing.assert_close(back, leaf.grad[(..., *mine)], rtol=1e-13, atol=1e-13)


@pytest.mark.mpi(min_size=1)
@pytest.mark.every_size
def test_gradcheck(groups):
    for group, mode in [(one, mode) for one in groups for mode in MODES]:
        grid = CartesianGrid(group, (group.size,))
        blocks = grid.decompose((2 * group.size + 1,))
        shape = (2, *blocks.local_shape(grid.coords))
        assert_gradients(
            lambda x, g=grid, b=blocks, m=mode: halo_exchange(x, g, 1 + (m == "circular"), decomposition=b, padding=m),
            shape,
            group,
            fast=mode != "reflect",
        )


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_periodic_grids_wrap_and_others_do_not(world):
    field = random((world.size * 2, 3), torch.float64, 1)
    for periodic in (False, True):
        grid = CartesianGrid(world, (world.size, 1), (periodic, False))
        x = field[2 * world.rank : 2 * world.rank + 2]
        padded = pad(field.T[None], (1, 1), mode="circular" if periodic else "constant")[0].T
        padded = pad(padded, (1, 1))
        assert torch.equal(halo_exchange(x, grid, 1), padded[2 * world.rank : 2 * world.rank + 4])


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_on_a_stream_the_interior_comes_between(world, layout):
    """Forward and backward: the message is sent before the interior is computed, and waited for after it."""
    grid = CartesianGrid(world, (1, world.size))
    blocks = grid.decompose((5, 3 * world.size + 1))
    plan = plan_halo(grid, blocks, 1)
    x = random((2, 3, *plan.source_shape), torch.float64, world.rank).contiguous(memory_format=layout).requires_grad_()
    stream = world.new_stream()
    order = []

    class Interior(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            order.append(("interior", len(log.events)))
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            order.append(("interior's gradient", len(log.events)))
            return 2 * g

    with trace(world) as log:
        started = start_halo_exchange(x, grid, 1, stream, decomposition=blocks)
        interior = Interior.apply(x)
        out = started.wait()
        assert out.is_contiguous(memory_format=layout)
        (out.square().sum() + interior.sum()).backward()
    assert [event.operation for event in log.events] == ["exchange"] * 2
    assert order == [("interior", 1), ("interior's gradient", 2)]
    assert {event.stream for event in log.events} == {stream.name}
    y = x.detach().clone().requires_grad_()
    again = transfer(y, plan, world)
    (again.square().sum() + 2 * y.sum()).backward()
    assert torch.equal(out, again) and torch.equal(x.grad, y.grad)
    point = plan_halo(grid, blocks, 0)
    assert torch.equal(start_transfer(x, point, world, stream).wait(), x)  # nothing to send
    stream.synchronize()


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_bytes_are_those_of_the_plan(world):
    for widths in (1, [(2, 0), (1, 3)]):
        grid = CartesianGrid(world, (world.size // 2, 2) if world.size % 2 == 0 else (world.size, 1), (True, False))
        blocks = grid.decompose((7, 11))
        plan = plan_halo(grid, blocks, widths)
        x = torch.ones(3, 2, *plan.source_shape)
        with trace(world) as log:
            halo_exchange(x, grid, widths, decomposition=blocks)
        (event,) = log.events
        assert event.bytes == 4 * 6 * (plan.sent_points + plan.received_points)
        assert plan.target_shape == tuple(
            n + (2 * widths if widths == 1 else sum(widths[axis])) for axis, n in enumerate(plan.source_shape)
        )


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_bad_input_is_an_error_on_every_rank(world):
    grid = CartesianGrid(world, (world.size,))
    blocks = grid.decompose((2 * world.size,))
    x = torch.zeros(2)
    with pytest.raises(ValueError, match=r"shape \[3\] is not this rank's block"):
        halo_exchange(torch.zeros(3), grid, 1, decomposition=blocks)
    with pytest.raises(ValueError, match=r"widths=-1 must be"):
        halo_exchange(x, grid, -1, decomposition=blocks)
    with pytest.raises(ValueError, match=r"widths=\[1, 1\] must be .* 1 axes"):
        halo_exchange(x, grid, [1, 1], decomposition=blocks)
    with pytest.raises(ValueError, match="too few for padding='reflect'"):
        halo_exchange(x, grid, 2 * world.size, decomposition=blocks, padding="reflect")
    with pytest.raises(ValueError, match=r"grid of shape \[1\] does not fit"):
        halo_exchange(x, grid, 1, decomposition=Decomposition(((2,),)))
    other = CartesianGrid(world, (1, world.size))
    with pytest.raises(CollectiveError, match=r"not those of one field .*\[2, 3\] at \[0, 0\], \[3, 3\] at \[0, 1\]"):
        halo_exchange(torch.zeros(2 + (world.rank == 1), 3), other, 1)
    with pytest.raises(CollectiveError, match="not those of one field"):
        halo_exchange(torch.zeros(3), other, 1)
    inside = (world.rank > 0) + (world.rank < world.size - 1)
    assert halo_exchange(x + 1, grid, 1).sum().item() == 2 + inside
