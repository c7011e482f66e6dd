"""DataParallel after failed backwards, with nested backwards, and with modules that change after its construction."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.training.failing import Fails
from trainers.data_parallel import DataParallel

pytestmark = [pytest.mark.mpi(min_size=2)]


def pair():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()


def drawn(world, rows=2):
    """The samples of all ranks, and this rank's."""
    x = torch.randn(world.size * rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return x, x[world.rank * rows : (world.rank + 1) * rows]


def assert_gradients(net, expected):
    for (name, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("then", ["no_sync", "no_samples"])
def test_a_failed_backward_leaves_nothing_to_a_step_without_a_backward(world, then):
    """Its buckets were sent early. They must be neither taken for the next ones, nor sent from within no_sync."""
    whole, x = drawn(world)
    net, expected = pair(), pair()
    with DataParallel(net, world, overlap=True, bucket_size=1) as replicas:
        with pytest.raises(ArithmeticError):
            net[1](Fails.apply(net[0](x))).sum().backward()
        net.zero_grad()
        if then == "no_sync":
            with replicas.no_sync():
                net(x).square().mean().backward()
                assert replicas.gradients._in_flight == {}
            net(x).square().mean().backward()
            (2 * expected(whole).square().mean()).backward()
        elif world.rank == 0:
            replicas.no_samples()
            ((1 - 1 / world.size) * expected(whole[2:]).square().mean()).backward()
        else:
            net(x).square().mean().backward()
            ((1 - 1 / world.size) * expected(whole[2:]).square().mean()).backward()
        assert_gradients(net, expected)


def test_a_backward_inside_another_one_is_an_error_and_the_next_one_is_right(world):
    whole, x = drawn(world)
    net, expected = pair(), pair()

    def loss(net, x, reentrant):
        a, b = net
        return checkpoint(lambda t: b(a(t)), a(x), use_reentrant=reentrant).square().mean()

    loss(expected, whole, False).backward()
    with DataParallel(net, world, overlap=True, bucket_size=1):
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            loss(net, x, True).backward()
        for _ in range(2):
            net.zero_grad()
            loss(net, x, False).backward()
            assert_gradients(net, expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda net: net[0].requires_grad_(True), r"no longer frozen: 0\.weight, 0\.bias"),
        (lambda net: net.append(nn.Linear(3, 3).double()), r"new or no longer frozen: 2\.weight, 2\.bias"),
        (lambda net: net.insert(1, nn.Linear(3, 3, bias=False).double()), r"new .*: 1\.weight"),
    ],
)
def test_parameters_that_come_later_are_an_error_on_every_rank(world, change, said):
    """They change on the last rank only. Their gradients would not be averaged, and replicas would part."""
    x = drawn(world)[1]
    net = pair()
    net[0].requires_grad_(False)
    last = world.rank == world.size - 1
    with DataParallel(net, world):
        net(x).sum().backward()
        if last:
            change(net)
        with pytest.raises(RuntimeError, match=said if last else "they have changed on another rank"):
            net(x).sum().backward()


class Buffered(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.layer = nn.Linear(3, 3).double()
        self.register_buffer("cache", first)
        self.next = None

    def forward(self, x):
        if self.next is not None:
            self.cache = self.next()
        return self.layer(x)


def test_expanded_buffers_are_made_equal(world):
    x = drawn(world)[1]
    net = Buffered(torch.full((1,), float(world.rank)).expand(5))
    with DataParallel(net, world):
        assert net.cache.tolist() == [0.0] * 5
        net.next = lambda: torch.full((1,), 3.0 + world.rank).expand(5)
        net(x).sum().backward()
        assert net.cache.tolist() == [3.0] * 5


def test_buffers_that_all_ranks_replace_alike_are_made_equal_and_may_be_none(world):
    x = drawn(world)[1]
    net = Buffered(torch.zeros(3))
    with DataParallel(net, world):
        for new in (lambda: torch.full((7,), float(world.rank)), lambda: None, lambda: torch.ones(2) * world.rank):
            net.next = new
            net(x).sum().backward()
            assert net.cache is None or not net.cache.any()


@pytest.mark.parametrize("other", [None, torch.zeros(5), torch.zeros(3, dtype=torch.float64)])
def test_buffers_that_one_rank_replaces_by_another_shape_are_an_error_on_every_rank(world, other):
    x = drawn(world)[1]
    net = Buffered(torch.zeros(3))
    net.next = lambda: other if world.rank == world.size - 1 else torch.ones(3)
    with DataParallel(net, world):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"other shapes on other ranks: cache.*equal_buffers=False"):
                net(x).sum().backward()
        assert net.layer.weight.grad is not None
