"""DataParallel after failed backwards, with nested backwards, and with modules that change after its construction."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainers.data_parallel import DataParallel

pytestmark = [pytest.mark.mpi(min_size=2)]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("on purpose")


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
                assert replicas.gradients._in_flight == []
            net(x).square().mean().backward()
            (2 * expected(whole).square().mean()).backward()
        elif world.rank == 0:
            replicas.no_samples()
            ((1 - 1 / world.size) * expected(whole[2:]).square().mean()).backward()
        else:
            net(x).square().mean().backward()
            ((1 - 1 / world.size) * expected(whole[2:]).square().mean()).backward()
        assert_gradients(net, expected)


def test_a_parameter_inside_and_outside_of_a_reentrant_checkpoint_gets_both_gradients(world):
    whole, x = drawn(world)
    net, expected = pair(), pair()

    def loss(net, x, reentrant):
        a, b = net
        return checkpoint(lambda t: b(a(t)), a(x), use_reentrant=reentrant).square().mean()

    loss(expected, whole, False).backward()
    with DataParallel(net, world):
        for _ in range(2):
            net.zero_grad()
            loss(net, x, True).backward()
            assert_gradients(net, expected)
    net.zero_grad()
    with DataParallel(net, world, overlap=True, bucket_size=1):
        again = loss(net, x, True)
        with pytest.raises(RuntimeError, match=r"0\.(weight|bias): a second gradient in one backward.*overlap=False"):
            again.backward()


@pytest.mark.parametrize("allowed", [False, True])
def test_a_parameter_that_a_reentrant_checkpoint_leaves_out_is_noticed_at_the_outer_end(world, allowed):
    """No parameter is outside of the checkpoints, so that no hook runs in the outer backward."""
    whole, x = drawn(world)
    net, expected = pair(), pair()
    expected[0](whole).square().mean().backward()

    def loss():
        outer = checkpoint(lambda t: checkpoint(net[0], t, use_reentrant=True), x, use_reentrant=True)
        return outer.square().mean()

    with DataParallel(net, world, allow_unused=allowed):
        x = x.clone().requires_grad_()
        if allowed:
            loss().backward()
            assert net[1].weight.grad is None
            assert_gradients(net[0], expected[0])
        else:
            with pytest.raises(RuntimeError, match=r"no gradient in the backward for: 1\.weight, 1\.bias"):
                loss().backward()
