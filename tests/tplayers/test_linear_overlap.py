"""What a column-parallel layer's backward communicates, on a stream beside its own products."""

import random
import threading
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import commengine
from tests.support.small_models import arguments, made, total
from tplayers import ColumnParallelLinear, initialize

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.every_size]

S, B, H = 8, 2, 16


class AtProducts(TorchDispatchMode):
    """Call ``seen(number)`` before each matrix product."""

    def __init__(self, seen):
        super().__init__()
        self.seen, self.count = seen, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.seen(self.count)
            self.count += 1
        return func(*args, **(kwargs or {}))


def column(group, sequence_parallel, stream):
    """A layer, its input, and what its backward gives."""
    layer = ColumnParallelLinear(
        H, 2 * H, group.comm, sequence_parallel=sequence_parallel, overlap_stream=stream, dtype=torch.float64
    )
    group.fill(layer)
    rows = S // group.size if sequence_parallel else S
    x = torch.randn(rows, B, H, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    y = layer(x)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(2 + group.rank)).double()

    def backward():
        y.backward(gradient)
        return x.grad, layer.weight.grad, layer.bias.grad

    return backward


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_products_run_beside_the_collectives(group, sequence_parallel):
    """A collective that cannot start before the next product is reached proves that nothing waited for it earlier."""
    expected = column(group, sequence_parallel, None)()
    stream = group.comm.new_stream()
    if not stream.threaded:
        pytest.skip("this MPI offers less than THREAD_MULTIPLE: a stream runs where it is enqueued")
    backward = column(group, sequence_parallel, stream)
    gates = [threading.Event() for _ in range(2)]
    progress = []

    def at_product(number):
        progress.append([(event.operation, event.end > 0, event.wait_start is not None) for event in log.events])
        gates[number].set()
        if number == 0:  # what is enqueued from here on starts when the product after this one is reached
            stream.enqueue(lambda: opened.append(gates[1].wait(30)))

    opened = []
    with commengine.trace(group.comm) as log, AtProducts(at_product):
        stream.enqueue(lambda: opened.append(gates[0].wait(30)))
        found = backward()
    assert opened == [True, True]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **({"rtol": 0, "atol": 0} if group.size == 2 else {}))
    names = ["all_gather", "reduce_scatter"] if sequence_parallel else ["all_reduce"]
    assert [(event.operation, event.stream) for event in log.events] == [(name, stream.name) for name in names]
    assert all(event.wait_end is not None for event in log.events)
    # At the product for x's gradient, and at that for the weight's: (operation, ended, waited for).
    if sequence_parallel:
        assert progress == [
            [("all_gather", False, False)],
            [("all_gather", True, True), ("reduce_scatter", False, False)],
        ]
    else:
        assert progress == [[], [("all_reduce", False, False)]]


def test_without_a_stream_the_collective_is_done_before_the_next_product(group):
    backward = column(group, False, None)
    ended = []
    with commengine.trace(group.comm) as log, AtProducts(lambda _: ended.append([e.end > 0 for e in log.events])):
        backward()
    assert ended == [[], [True]]


def test_a_frozen_weight_gathers_nothing_and_a_leaf_input_reduces_nothing(group):
    stream = group.comm.new_stream()
    layer = ColumnParallelLinear(H, 2 * H, group.comm, sequence_parallel=True, overlap_stream=stream)
    initialize(layer, 1)
    operations = []
    for of_x, of_weight in ((True, False), (False, True)):
        layer.requires_grad_(of_weight)
        y = layer(torch.ones(S // group.size, B, H, requires_grad=of_x))
        with commengine.trace(group.comm) as log:
            y.sum().backward()
        operations.append([event.operation for event in log.events])
    assert operations == [["reduce_scatter"], ["all_gather"]]


@pytest.mark.parametrize("kind", ["gpt", "bert"])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"recompute": "full"}], ids=str)
def test_model_is_bit_equal_however_slow_the_stream_is(group, options, kind):
    """Delays differ between ranks, and memory that a collective still uses must not be used again."""
    stream, gradients = group.comm.new_stream(), []
    delays = random.Random(group.rank)
    for overlap in (None, stream):
        model = made(kind, group.comm, num_layers=2, overlap_stream=overlap, **options)
        inputs, named = arguments(kind)
        loss = total(model(*inputs, **named))
        if overlap is not None:
            _delay(stream.transport, delays)
        with commengine.trace(group.comm) as log:
            loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    # An MPI may sum more than two numbers in another order when it does not block.
    tolerance = {"rtol": 0, "atol": 0} if group.size == 2 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(gradients[1], gradients[0], **tolerance)
    on_stream = [event.operation for event in log.events if event.stream == stream.name]
    columns = 2 * 2 + 1  # qkv and up of two layers, and the logits
    if "sequence_parallel" in options:
        assert sorted(on_stream) == ["all_gather"] * columns + ["reduce_scatter"] * columns
    else:
        assert on_stream == ["all_reduce"] * columns


def _delay(routes, delays):
    prepared = routes.prepared
    routes.prepared = lambda operation, args: _delayed(prepared(operation, args), delays)


def _delayed(operation, delays):
    """What runs ``operation``, late, and with its output poisoned until then where that is not its input."""

    def run(*tensors):
        if isinstance(tensors[1], torch.Tensor):
            tensors[0].fill_(torch.nan)
        time.sleep(delays.random() / 100)
        operation(*tensors)

    return run
