"""Halo exchange on real ranks, against torch's padding of the whole field."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from commengine import CartesianGrid, CollectiveError, CollectiveMismatch, Communicator, Decomposition, trace
from tests.support.adjoints import (
    assert_differentiates_twice,
    assert_dot_product,
    assert_gradients,
    random,
)
from tests.support.fields.moved_points import moved, moved_for_halos
from tplayers.movement.halo import halo_accumulate, halo_exchange, plan_halo, shift
from tplayers.movement.plan import repartition_plan
from tplayers.movement.transfer import start_transfer, transfer

MODES = {"zeros": "constant", "circular": "circular", "reflect": "reflect", "replicate": "replicate"}


def points_of(messages):
    """The points that one rank sends, or receives, for each channel and sample."""
    return sum(math.prod(piece.shape) for _, pieces in messages for piece in pieces)


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
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        *((mode, torch.float64) for mode in MODES),
        ("circular", torch.complex128),
        *(pytest.param(mode, torch.complex128, marks=pytest.mark.long) for mode in ("zeros", "reflect", "replicate")),
    ],
)
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
        for rank in range(group.size):
            spans = blocks.slices(grid.coords_at(rank))
            part = [slice(s.start, s.stop + low + high) for s, (low, high) in zip(spans, ends, strict=True)]
            view = pad(leaf, [end for pair in reversed(ends) for end in pair], mode=MODES[mode])[(..., *part)]
            view.backward(random(view.shape, dtype, rank))
        torch.testing.assert_close(back, leaf.grad[(..., *mine)], rtol=1e-13, atol=1e-13)


@pytest.mark.mpi(min_size=1)
@pytest.mark.every_size
def test_gradcheck(groups):
    for group, mode in [(one, mode) for one in groups for mode in MODES]:
        grid = CartesianGrid(group, (group.size,))
        blocks = grid.decompose((2 * group.size + 1,))
        shape = (2, *blocks.local_shape(grid.coords))

        def exchange(x, grid=grid, blocks=blocks, mode=mode):
            return halo_exchange(x, grid, 1 + (mode == "circular"), decomposition=blocks, padding=mode)

        assert_gradients(exchange, shape, group, fast=mode != "reflect")
        assert_differentiates_twice(exchange, shape, group)


@pytest.mark.mpi(min_size=1)
@pytest.mark.every_size
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_shift(groups, dtype):
    for group in groups:
        line = CartesianGrid(group, (group.size,), periodic=False)
        ring = CartesianGrid(group, (1, group.size), periodic=True)
        for step in (1, -1, 2, 0):
            uneven = line.decompose((2 * group.size + 1,))
            blocks = [random((2, size), dtype, rank) for rank, size in enumerate(uneven.blocks[0])]

            def along(x, step=step, line=line, uneven=uneven):
                return shift(x, line, 0, step, decomposition=uneven)

            source = group.rank - step
            expected = blocks[source] if 0 <= source < group.size else torch.zeros_like(blocks[group.rank])
            assert torch.equal(assert_dot_product(along, blocks[group.rank], group), expected)
            assert_gradients(along, blocks[group.rank].shape, group)
            same = [random((3, 2), dtype, rank) for rank in range(group.size)]
            around = assert_dot_product(lambda x, s=step, r=ring: shift(x, r, -1, s), same[group.rank], group)
            assert torch.equal(around, same[source % group.size])
            assert_differentiates_twice(lambda x, s=step, r=ring: shift(x, r, 1, s), (3, 2), group)


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
        started = start_transfer(x, plan, world, stream)
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
    with pytest.raises(RuntimeError, match="called twice: keep the block"):
        started.wait()
    stream.synchronize()


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_a_trace_shows_the_bytes_of_the_formula(world):
    """Forward and backward send the same bytes: those of the plan, and those of a count of every point."""
    periodic = (True, False)
    grid = CartesianGrid(world, (world.size // 2, 2) if world.size == 4 else (world.size, 1), periodic)
    blocks = grid.decompose((11, 7))
    halo_exchange(torch.zeros(2, 3, *blocks.local_shape(grid.coords), requires_grad=True).double(), grid, 0)
    for widths in ([(1, 1), (1, 1)], [(3, 0), (0, 2)], [(0, 0), (6, 6)]):
        points = moved_for_halos(blocks, widths, periodic)
        sent, received = points[world.rank].sum(), points[:, world.rank].sum()
        plan = plan_halo(grid, blocks, widths)
        assert [points_of(plan.sends), points_of(plan.receives)] == [sent, received]
        assert len(plan.receives) == np.count_nonzero(points[:, world.rank])
        x = torch.zeros(2, 3, *plan.source_shape, dtype=torch.float64, requires_grad=True)
        with trace(world) as log:
            halo_exchange(x, grid, widths, decomposition=blocks).sum().backward()
        nbytes = 8 * 2 * 3 * (sent + received)
        assert [event.bytes for event in log.events] == ([nbytes] * 2 if nbytes else [])
    slabs, pencils = Decomposition.even((11, 7), (world.size, 1)), Decomposition.even((11, 7), (1, world.size))
    x = torch.zeros(slabs.local_shape((world.rank, 0)))
    with trace(world) as log:
        transfer(x, repartition_plan(slabs, pencils, world.rank), world)
    total = world.mpi.allreduce(sum(event.bytes for event in log.events))
    needed = [[(part.start, part.stop) for part in pencils.slices((0, rank))] for rank in range(world.size)]
    assert total == 2 * 4 * moved(slabs, needed).sum()  # an event counts both directions


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


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_with_checks_a_rank_that_differs_is_an_error_on_all(mpi_world):
    with Communicator(mpi_world, checked=True) as comm:
        grid = CartesianGrid(comm, (comm.size,))
        blocks = grid.decompose((2 * comm.size,))
        first = comm.rank == 0
        with pytest.raises(CollectiveError, match=r"rank 0: a tensor of shape \[3\] is not this rank's block"):
            halo_exchange(torch.zeros(3 if first else 2), grid, 1, decomposition=blocks)
        with pytest.raises(ValueError, match=r"must be alike; by rank they are \[4\] of torch.float32, \[5\]"):
            halo_exchange(torch.zeros(4 if first else 5, 2), grid, 1, decomposition=blocks)
        for _ in range(2):
            with pytest.raises(CollectiveMismatch, match=r"asked for shift of float64 \[2\], .* of float32 \[2\]"):
                shift(torch.zeros(2, dtype=torch.float64 if first else torch.float32), grid, 0)
            shift(torch.zeros(2), grid, 0)
        assert halo_exchange(torch.ones(2), grid, 1, decomposition=blocks).shape == (4,)


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_size
def test_at_the_first_call_a_rank_that_differs_is_an_error_on_all(mpi_world):
    with Communicator(mpi_world) as comm:
        grid = CartesianGrid(comm, (comm.size,), periodic=True)
        blocks = grid.decompose((2 * comm.size,))
        first = comm.rank == 0
        other = torch.zeros(4 if first else 5, 2)
        with pytest.raises(CollectiveMismatch, match=r"rank 0 asked for shift of float32 \[3\]"):
            shift(torch.zeros(3 if first else 4), grid, 0)
        with pytest.raises(CollectiveMismatch, match=r"rank 0 asked for shift of float32 \[4\] \+ the block"):
            shift(other, grid, 0, decomposition=blocks)
        with pytest.raises(CollectiveMismatch, match=r"rank 0 asked for halo_exchange of float32 \[4\] \+ the block"):
            halo_exchange(other, grid, 1, decomposition=blocks)
        with pytest.raises(CollectiveMismatch, match=r"a wrong block \(the tensor is \[3\]\)"):
            halo_exchange(torch.zeros(3 if first else 2), grid, 1, decomposition=blocks)
        with pytest.raises(CollectiveMismatch, match=r"rank 0 asked for .* requires_grad=True"):
            halo_exchange(torch.zeros(2, requires_grad=first), grid, 1, decomposition=blocks)
        with pytest.raises(CollectiveMismatch, match=r"rank 0 asked for halo_accumulate of float64"):
            halo_accumulate(torch.zeros(4).to(torch.float64 if first else torch.float32), grid, 1, decomposition=blocks)
        compared, compare = [], comm.compare
        comm.compare = lambda *words: [compared.append(words), compare(*words)]
        for again in (False, True):  # the ranks compare once: then a solver repeats its exchange without
            compared.clear()
            with trace(comm) as log:
                halo_exchange(torch.ones(2), grid, 1, decomposition=blocks)
            assert [event.operation for event in log.events] == ["exchange"] and len(compared) == (not again)
