"""The convolution of a block and of its halo, apart: what waits for what, and what it sends."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import commengine
import tplayers
from commengine import CartesianGrid, Communicator
from tests.support.fields.comparison import close, cut, draw
from tests.support.fields.moved_points import moved_for_halos
from tplayers.fields.geometry import Sliding
from tplayers.fields.halo_convolution import frame

pytestmark = pytest.mark.mpi


class AtConvolutions(TorchDispatchMode):
    """Call ``seen(name, number)`` before each convolution, and before each convolution's backward."""

    def __init__(self, seen):
        super().__init__()
        self.seen, self.count = seen, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
            self.seen(func.__name__.split(".")[0], self.count)
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def comm(mpi_world):
    with Communicator(mpi_world, device="cpu") as comm:
        yield comm


@pytest.mark.mpi(min_size=2)
def test_the_halo_travels_while_the_interior_is_computed(comm):
    """A stream that is held up until the interior's convolution is reached proves that nothing waited earlier."""
    grid = CartesianGrid(comm, (comm.size,), periodic=True)
    field = grid.decompose((8 * comm.size,))
    stream = comm.new_stream()
    if not stream.threaded:
        pytest.skip("this MPI offers less than THREAD_MULTIPLE: a stream runs where it is enqueued")
    options = {"padding": 1, "padding_mode": "circular", "dtype": torch.float64}
    layer = tplayers.FieldConv(2, 3, 3, grid, field, overlap_stream=stream, **options)
    plain = tplayers.FieldConv(2, 3, 3, grid, field, **options)
    tplayers.initialize(layer, 1)
    plain.load_state_dict(layer.state_dict())
    whole = draw(2, 2, *field.shape)
    inputs = [cut(whole, field, grid).requires_grad_() for _ in range(2)]
    layer(inputs[0])  # the ranks compare in the first forward
    gates = {"convolution": threading.Event(), "convolution_backward": threading.Event()}
    order, opened = [], []

    def seen(name, number):
        order.append((name, [event.end > 0 for event in log.events if event.stream == stream.name]))
        if name == "convolution" or number == 5:  # the forward has 3 convolutions; the backward's third is the interior
            gates[name].set()

    with commengine.trace(comm) as log, AtConvolutions(seen):
        stream.enqueue(lambda: opened.append(gates["convolution"].wait(30)))
        y = layer(inputs[0])
        stream.enqueue(lambda: opened.append(gates["convolution_backward"].wait(30)))
        y.backward(torch.ones_like(y))
    assert opened == [True, True]
    assert order == [
        ("convolution", [False]), ("convolution", [True]), ("convolution", [True]),
        ("convolution_backward", [True]), ("convolution_backward", [True]), ("convolution_backward", [True, False]),
    ]  # fmt: skip
    z = plain(inputs[1])
    z.backward(torch.ones_like(z))
    close(y, z)
    close(inputs[0].grad, inputs[1].grad)
    close(layer.weight.grad, plain.weight.grad)
    stream.close()


@pytest.mark.parametrize(
    ("rules", "block", "native", "expected"),
    [
        ([Sliding(3, before=1, after=1)], [(4, 8)], [0], [[(4, 5)], [(7, 8)]]),
        ([Sliding(5, before=2, after=2)], [(4, 7)], [0], [[(4, 7)]]),
        ([Sliding(3, dilation=2, before=2, after=2)], [(3, 10)], [0], [[(3, 5)], [(8, 10)]]),
        ([Sliding(1), Sliding(3, before=1, after=1)], [(0, 4), (2, 5)], [0, 1], []),
        (
            [Sliding(3, before=1, after=1)] * 2,
            [(0, 4), (4, 8)],
            [0, 0],
            [[(0, 1), (4, 8)], [(3, 4), (4, 8)], [(1, 3), (4, 5)], [(1, 3), (7, 8)]],
        ),
    ],
)
def test_the_frame_has_the_outputs_that_read_more_than_the_block_once(rules, block, native, expected):
    assert frame(rules, block, native) == expected


@pytest.mark.parametrize("mode", ["circular", "reflect"])
def test_gradients_of_gradients(comm, mode):
    """As a network of a differential equation needs them: a loss on the derivative by the input."""
    grid = CartesianGrid(comm, (comm.size, 1))
    field = grid.decompose((3 * comm.size + 1, 6))
    options = {"padding": 2, "padding_mode": mode, "dtype": torch.float64}
    layer = tplayers.FieldConv(1, 1, 5, grid, field, **options)
    torch.manual_seed(1)  # the same on all ranks
    theirs = torch.nn.Conv2d(1, 1, 5, **options)
    layer.load_state_dict(theirs.state_dict())

    def second(conv, x, sum_over_ranks):
        x.requires_grad_()
        y = conv(x).pow(3)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = slope.square().sum()
        loss.backward()
        return x.grad, sum_over_ranks(loss.item())

    whole = draw(2, 1, *field.shape)
    expected, loss = second(theirs, whole.clone(), lambda loss: loss)
    found, total = second(layer, cut(whole, field, grid), lambda loss: sum(comm.mpi.allgather(loss)))
    assert total == pytest.approx(loss, rel=1e-12)
    close(found, cut(expected, field, grid))
    for ours, other in zip(layer.parameters(), theirs.parameters(), strict=True):
        close(ours.grad, other.grad)


def test_a_block_that_no_neighbour_reads_sends_nothing_and_frozen_inputs_send_nothing_back(comm):
    grid = CartesianGrid(comm, (1, comm.size))
    field = grid.decompose((6, 4 * comm.size))
    layer = tplayers.FieldConv(2, 2, (3, 2), grid, field, stride=(1, 2), padding=(1, 0))
    wide = tplayers.FieldConv(2, 2, 3, grid, field, padding=1)
    for one in (layer, wide):
        tplayers.initialize(one, 1)
    x = cut(draw(1, 2, *field.shape), field, grid).float()
    layer(x), wide(x)
    operations = []
    for one in (layer, wide):
        with commengine.trace(comm) as log:
            one(x).sum().backward()
        operations.append([event.operation for event in log.events])
    several = comm.size > 1
    assert operations == [["all_reduce"] * several, ["exchange", "all_reduce"] * several]
    points = moved_for_halos(field, [(0, 0), (1, 1)])
    sent, received = points[comm.rank].sum(), points[:, comm.rank].sum()
    exchanged = sum(event.bytes for event in log.events if event.operation == "exchange")
    assert exchanged == 2 * 4 * (received + sent)  # two channels of four bytes
    assert received == 6 * ((grid.coords[1] > 0) + (grid.coords[1] < comm.size - 1))


@pytest.mark.mpi(min_size=4)
def test_the_bytes_of_edges_and_corners_are_the_formulas(comm):
    grid = CartesianGrid(comm, (2, comm.size // 2))
    field = grid.decompose((9, 11))
    layer = tplayers.FieldConv(3, 1, (3, 5), grid, field, padding=(1, 2))
    tplayers.initialize(layer, 1)
    x = cut(draw(2, 3, *field.shape), field, grid).float().requires_grad_()
    layer(x)
    with commengine.trace(comm) as log:
        layer(x).sum().backward()
    points = moved_for_halos(field, [(1, 1), (2, 2)])
    moved = points[comm.rank].sum() + points[:, comm.rank].sum()
    assert [event.operation for event in log.events] == ["exchange", "exchange", "all_reduce"]
    assert [event.bytes for event in log.events[:2]] == [2 * 3 * 4 * moved] * 2


def test_autocast_computes_in_half_precision(comm):
    grid = CartesianGrid(comm, (comm.size, 1))
    field = grid.decompose((4 * comm.size, 8))
    layer = tplayers.FieldConv(3, 4, 3, grid, field, padding=1)
    tplayers.initialize(layer, 1)
    x = cut(draw(2, 3, *field.shape), field, grid).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    found = (y.detach().float(), x.grad, layer.weight.grad)
    x.grad = layer.weight.grad = None
    exact = layer(x)
    exact.sum().backward()
    for half, whole in zip(found, (exact.detach(), x.grad, layer.weight.grad), strict=True):
        assert whole.dtype == half.dtype == torch.float32
        torch.testing.assert_close(half, whole, rtol=0.02, atol=0.02 * float(whole.abs().max()))
